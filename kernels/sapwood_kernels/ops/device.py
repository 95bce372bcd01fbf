"""The operations of every device, in plain torch; a kind of device overrides those that it computes faster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from sapwood_kernels import reference
from sapwood_kernels.experts.reference import ClampedGate, expert_sum
from sapwood_kernels.experts.routing import Routing, route
from sapwood_kernels.experts.stack import ExpertStack
from sapwood_kernels.experts.tiles.tuning import Tuning
from sapwood_kernels.kv_destination import KVDestination
from sapwood_kernels.lora.slots import LoraSlots
from sapwood_kernels.ops.contracts import (
    GROUP,
    ExpertSum,
    FewRows,
    Float8,
    Gate,
    LatentProducts,
    ManyRows,
    Norm,
    NormedLogits,
    OneRow,
    RouteTokens,
    StoreAbsorbed,
    StoredProduct,
    StoreHeads,
    StoreLatent,
)
from sapwood_kernels.quantised import int8
from sapwood_kernels.quantised.cpu_grouped import plain_product
from sapwood_kernels.quantised.grouped import GroupedWeight
from sapwood_kernels.rotary_pairs import RotaryPairs
from sapwood_kernels.sampling import cpu_sampling
from sapwood_kernels.state.contracts import StateSteps
from sapwood_kernels.state.reference import gated_norm

# The operations that layers, sampling and the runner take from the device. Here: what any device of torch's can do.


# A queue of a device's besides the one that computes: what waits there for another device holds no computation up.


class SideQueue:
    """Here for a device that queues nothing: what is called is done at once, in the order of the calls."""

    def behind(self, used: Tensor) -> AbstractContextManager[None]:
        """While it is entered, work continues this queue, after all that the current one has got so far.

        Args:
            used: Was made on the current queue; keeps its memory until this queue is done with it.
        """
        return nullcontext()


class CudaSideQueue(SideQueue):
    """A CUDA stream.

    Args:
        device: Its device.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def behind(self, used: Tensor) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream(used.device))
        used.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield


# Pending work of a device: tensors on their way to the host, and marks in its queue.


class HostCopies:
    """Tensors on their way to the host.

    Args:
        tensors: In the host's memory, perhaps still being filled.
        wait: Returns once they are filled.
        check: Returns at once; raises what the device has failed with.
    """

    def __init__(
        self,
        tensors: list[Tensor],
        wait: Callable[[], object] = lambda: None,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        self._tensors = tensors
        self._wait = wait
        self._check = check

    def wait(self) -> list[Tensor]:
        """Waits for the copies and returns them."""
        self._wait()
        return self._tensors

    def check(self) -> None:
        """Raises what the device is known to have failed with; does not wait."""
        self._check()


class Fence:
    """A mark in the work queued on a device. This class serves a device that queues nothing."""

    def set(self) -> None:
        """Sets the mark after all that is queued on the current stream."""

    def wait(self) -> None:
        """Waits until the device has reached the mark; at once if none was set."""


class Moment:
    """When a device was done with all that had been queued on the current stream. This class serves one that queues nothing."""

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def seconds_since(self, earlier: Moment) -> float:
        """Seconds from another moment to this one; the device must have reached both."""
        return self._at - earlier._at


# All between projections and attention, put together from a device's operations where no kernel does it in one.


Rope = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``reference.rope`` of heads [T, H, D], with cos and sin [T, 1, D]."""


def rope_of(partners: Tensor) -> Rope:
    """The rotation of numbers that are not half of D apart.

    Args:
        partners: int64 [D], as ``reference.rope`` takes it.
    """
    return lambda x, cos, sin: reference.rope(x, cos[:, 0], sin[:, 0], partners)


def heads_store(num_heads: int, num_kv_heads: int, norm: Callable[[Tensor], Tensor] | None, rope: Rope) -> StoreHeads:
    """Returns a function that norms, rotates and stores the heads of a step.

    Args:
        num_heads: H.
        num_kv_heads: K.
        norm: Of query and key heads, [T, H + K, D]; None: there is none.
        rope: Rotates them.
    """
    rotated = num_heads + num_kv_heads

    def store(qkv: Tensor, cos: Tensor, sin: Tensor, to: KVDestination) -> Tensor:
        heads = qkv.view(len(qkv), rotated + num_kv_heads, -1)
        query_key = heads[:, :rotated] if norm is None else norm(heads[:, :rotated])
        query_key = rope(query_key, cos, sin)
        query, key = query_key[:, :num_heads], query_key[:, num_heads:]
        to.store(key, heads[:, rotated:])
        return query

    return store


def latent_store(rank: int, norm: Callable[[Tensor], Tensor], rope: Rope, *, interleaved: bool) -> StoreLatent:
    """Returns a function that norms, rotates and stores the vectors of a step.

    Args:
        rank: Numbers of a vector's latent part: R.
        norm: Of these, [T, R].
        rope: Rotates what comes after them, and the ends of queries.
        interleaved: Whether the two numbers that are turned together stand side by side, not half of E apart.
    """

    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if interleaved:
            x = torch.cat((x[..., 0::2], x[..., 1::2]), 2)
        return rope(x, cos, sin)

    def store(vectors: Tensor, query: Tensor, cos: Tensor, sin: Tensor, to: KVDestination) -> Tensor:
        rotary = vectors.shape[1] - rank
        end = turned(vectors[:, None, rank:], cos, sin)
        to.store_vectors(torch.cat((norm(vectors[:, :rank])[:, None], end), 2))
        return torch.cat((query[..., :-rotary], turned(query[..., -rotary:], cos, sin)), 2)

    return store


ResultT = TypeVar("ResultT")


class DeviceOps:
    """The operations of a device, each the plain-torch reference unless a class for the device has a faster one.

    A method that takes weights is called once when they are loaded, and returns what is called in each step.

    Args:
        device: The device.

    Attributes:
        device: The device.
        default_dtype: The dtype in which a model runs by default.
        asynchronous: Whether launched work is queued, so that a step can be planned while the one before is computed.
        captures: Whether launches can be captured in CUDA graphs.
        multiplies_groups: Whether :meth:`grouped` reads weights of any groups as they are held.
        groups_experts: Whether :meth:`expert_sum` reads experts' matrices of few bits as they are stored, all in one tensor.
        joins_shared: Whether a shared expert is computed as others that all tokens go to, where it has their widths; it is no
            layer of its own then.
        processors: Its multiprocessors: programs that run at once.
        moment: Constructed, marks when the device is done with what is queued by then.
        tuning: Where the tiles of experts come from.
        lora_multiple: Ranks of adapters are filled up with zeros to a multiple of this.
        state_steps: Kernels that advance states by one token a row; None: layers do that in torch.
        state_prompts: Kernels that advance states by spans; None: layers do that in torch.
    """

    default_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    asynchronous = False
    captures = False
    multiplies_groups = False
    groups_experts = False
    joins_shared = False
    moment: type[Moment] = Moment
    processors = 1
    lora_multiple = 1
    state_steps: StateSteps | None = None
    state_prompts: StateSteps | None = None

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tuning = Tuning()

    def to_device(self, array: npt.NDArray[np.generic]) -> Tensor:
        """A tensor with the array's contents; the array must not change while the tensor is used."""
        return torch.from_numpy(array).to(self.device)

    def fill(self, target: Tensor, array: npt.NDArray[np.generic]) -> None:
        """Copies an array into a tensor of its shape on the device; :meth:`to_device` without a new tensor."""
        target.copy_(torch.from_numpy(array))

    def copy_states(self, states: Tensor, pairs: Tensor) -> None:
        """Copies slots, as ``triton_copy.copy_states`` has it."""
        states.index_copy_(1, pairs[1], states.index_select(1, pairs[0]))

    def to_host(self, tensors: Sequence[Tensor]) -> HostCopies:
        """Begins to copy tensors to the host; later work on the device's current stream may change the tensors."""
        return HostCopies([tensor.to("cpu", copy=True) for tensor in tensors])

    def aside(self, read: Callable[[], ResultT]) -> ResultT:
        """The device memory that ``read`` sees now, without waiting for queued work."""
        return read()

    def fence(self) -> Fence:
        """A new mark for the device's queue of work."""
        return Fence()

    def side_queue(self) -> SideQueue:
        """A new queue of the device, besides the one that computes."""
        return SideQueue()

    def lora_slots(self, slots: int, rank: int, dtype: torch.dtype) -> LoraSlots:
        """Slots for adapters.

        Args:
            slots: How many.
            rank: The largest rank, a multiple of ``lora_multiple``.
            dtype: That of rows and matrices.
        """
        return LoraSlots(slots, dtype, self.gated, self.device)

    def rms_norm(self, weight: Tensor, eps: float, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        """``reference.rms_norm`` of inputs of ``dtype`` by a float32 weight."""
        return partial(reference.rms_norm, weight=weight, eps=eps)

    def add_normed(self, x: Tensor, residual: Tensor, norm: Norm) -> Tensor | None:
        """Adds x [T, N] to the residual, in place; returns the norm of the result if that is one pass, None if not."""
        residual += x
        return None

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``reference.rope``, with ``cos`` and ``sin`` [T, 1, D]."""
        return reference.rope(x, cos[:, 0], sin[:, 0])

    def angles(self, table: Tensor, positions: Tensor, pairs: RotaryPairs) -> tuple[Tensor, Tensor]:
        """The cosines and sines [T, 1, D] of some positions, int64 [T], as ``rope`` takes them.

        Args:
            table: [P, R], contiguous: for each position the cosine of each pair, then the sines.
            positions: Below P.
            pairs: Which numbers are rotated together.
        """
        cos, sin = table.index_select(0, positions)[:, None].chunk(2, dim=-1)
        return pairs.spread(cos, sin)

    def gated(self, gate: Gate) -> Callable[[Tensor], Tensor]:
        """The gated activation of contiguous [T, 2N] -> [T, N]."""
        return reference.silu_mul if gate == "silu" else reference.gelu_tanh_mul

    def store_heads(
        self,
        num_heads: int,
        num_kv_heads: int,
        norm: tuple[Tensor, Tensor, float] | None,
        dtype: torch.dtype,
        pairs: RotaryPairs | None = None,
    ) -> StoreHeads:
        """A function that norms, rotates and stores the heads of a step.

        Args:
            num_heads: H.
            num_kv_heads: K.
            norm: The weights of a query head's and of a key head's norm, float32 [D] each, and eps; None: no norm.
            dtype: The heads'.
            pairs: Which numbers are rotated together; None: the halves of a head.
        """
        heads_norm: Callable[[Tensor], Tensor] | None = None
        if norm is not None:
            parts = norm[0].expand(num_heads, -1), norm[1].expand(num_kv_heads, -1)
            heads_norm = self.rms_norm(torch.cat(parts), norm[2], dtype)
        rope: Rope = self.rope
        if pairs is not None and not pairs.are_halves:
            rope = rope_of(pairs.partners().to(self.device))
        return heads_store(num_heads, num_kv_heads, heads_norm, rope)

    def store_latent(self, weight: Tensor, eps: float, dtype: torch.dtype, *, interleaved: bool) -> StoreLatent:
        """A function that norms, rotates and stores the vectors of a step.

        Args:
            weight: The norm's of a vector's latent part, float32 [R].
            eps: Added to the mean square in it.
            dtype: The vectors'.
            interleaved: Whether the two numbers that are turned together stand side by side, not half of E apart.
        """
        return latent_store(len(weight), self.rms_norm(weight, eps, dtype), self.rope, interleaved=interleaved)

    def store_absorbed(self, weight: Tensor, eps: float, up: Tensor, *, interleaved: bool) -> StoreAbsorbed | None:
        """Returns a function that absorbs all queries of a step and stores its vectors; None: no kernel does both.

        Args:
            weight, eps, interleaved: As :meth:`store_latent` takes them.
            up: As :meth:`latent_products` takes it.
        """
        return None

    def latent_products(self, up: Tensor, nope: int) -> LatentProducts | None:
        """The products of few tokens with the matrix of latent attention's heads; None: there are none.

        Args:
            up: [H, N + V, R], as ``LatentHeads`` has it; contiguous.
            nope: N.
        """
        return None

    def packed(self, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor] | None:
        """``x @ weight.T + bias`` faster than torch's, in place of it; None: torch's is the fastest."""
        return None

    def gguf_product(
        self, parts: Sequence[tuple[str, Tensor]], columns: int, *, digits: int = 0
    ) -> StoredProduct | None:
        """The product with matrices as GGUF files store them; None: there is none with one of these types.

        Args:
            parts: For each matrix its type (``Q4_K``) and its rows' bytes, uint8 [rows, bytes], which are kept and not copied.
            columns: Numbers in a row: K.
            digits: x may be rounded to this many digits of a byte of the largest of each 32 numbers, where that is faster: 2; 3,
                which is as near as float32; 0: it may not.
        """
        return None

    def one_row(self, weight: Tensor, bias: Tensor | None = None, scales: Tensor | None = None) -> OneRow | None:
        """The fused product of a single row; None: there is none.

        Args:
            weight: [N, K].
            bias: [N].
            scales: float32, of a float8 weight: [N, 1], or [N / 128, K / 128] by block.
        """
        return None

    def few_rows(self, weight: Tensor, bias: Tensor | None) -> FewRows | None:
        """The fused product of few rows with a weight [N, K] of 16 bits; None: there is none that is quicker than torch's."""
        return None

    def grouped(self, weight: GroupedWeight) -> Callable[[Tensor], Tensor]:
        """``x @ weight.T`` with a weight of 4 or 8 bits, [T, K] -> [T, N]; it may hold the weight in a layout of its own."""
        return plain_product(weight)

    def grouped_few(self, weight: GroupedWeight, bias: Tensor | None, dtype: torch.dtype) -> FewRows | None:
        """The fused product of few rows in a dtype with such a weight; None: there is none."""
        return None

    def grouped_many(self, weight: GroupedWeight, dtype: torch.dtype) -> ManyRows | None:
        """The fused product of more rows than :meth:`grouped_few` has; None: there is none."""
        return None

    def tune_experts(self, seconds: float, folder: Path) -> None:
        """Has :meth:`expert_sum` measure from now on what is fastest for experts of new sizes, where there is a choice.

        Args:
            seconds: Longest that it may take for each kind of layer; 0: nothing is measured.
            folder: Where what was found is kept for later.
        """

    def expert_sum(
        self, gate_up: ExpertStack, down: ExpertStack, gate: Gate | ClampedGate, chosen: int, shared: int = 0
    ) -> ExpertSum:
        """A function that sums the outputs of each token's experts, weighted.

        Args:
            gate_up: Each expert's matrix before the gated activation.
            down: That after it.
            gate: The activation.
            chosen: How many experts a token goes to.
            shared: To how many of them, the last ones, all tokens go.
        """
        activate = gate if isinstance(gate, ClampedGate) else self.gated(gate)

        def summed(x: Tensor, ids: Tensor, weights: Tensor, /, *, add_to: Tensor | None = None) -> Tensor:
            result = expert_sum(x, ids, weights, gate_up, down, activate)
            return result if add_to is None else add_to.add_(result)

        return summed

    def router_logits(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        """A router's product in float32, ``x.float() @ weight.T + bias``: [T, K] -> [T, E], or parts of it, [T, S, E].

        Args:
            weight: float32 [E, K].
            bias: float32 [E], or None.
            dtype: That of x.
        """
        return lambda x: F.linear(x.float(), weight, bias)

    def normed_logits(self, weight: Tensor, bias: Tensor | None) -> NormedLogits | None:
        """A router's product with the norm before it, in one kernel for few rows; None: the device has none."""
        return None

    def router(self, routing: Routing, correction: Tensor | None, counts: Tensor, ranks: int = 1) -> RouteTokens:
        """A function that chooses each token's experts.

        Args:
            routing: How they are chosen.
            correction: float32 [E], as ``routing.route`` has it.
            counts: int64 [E]: how many tokens go to each expert is added in place.
            ranks: Of this many ranks it gets the rows, one rank's after the other's.
        """

        def choose(logits: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
            ids, weights = route(logits, routing, correction)
            chosen = ids[:, : routing.chosen].flatten()
            counts.scatter_add_(0, chosen, torch.ones_like(chosen))
            return ids, weights

        return choose

    def turns(self, table: Tensor, copies: Tensor, ids: Tensor, first: int) -> Tensor:
        """The table's entry for each pair of a row and an expert; the row's number chooses among the expert's copies.

        Args:
            table: int64 [E + 1, most copies].
            copies: int64 [E + 1], at least 1: how many an expert has.
            ids: Integers [T, k], up to E; contiguous.
            first: The first row's number.

        Returns:
            Integers [T, k].
        """
        ids = ids.long()
        turns = torch.arange(first, first + len(ids), device=ids.device)[:, None] % copies[ids]
        return table[ids, turns]

    def padded(self, tokens: int, of_ranks: Sequence[int] = ()) -> AbstractContextManager[None]:
        """While it is entered, some rows of what is launched pad a captured step: :meth:`router` gives them no expert.

        Args:
            tokens: How many of the first rows are tokens.
            of_ranks: Where ranks' rows come together, as many of each: how many of each rank's first ones are tokens.
        """
        return nullcontext()

    def int8_product(
        self, x: Tensor, weight: Tensor, scales: Tensor, *, norm: tuple[Tensor, float] | None = None, gate: Gate | None = None,
        gate_after: Gate | None = None, add_to: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """``int8.product`` of the normed or gated ``x``, gated after it, or ``add_to`` once that was added: int8 [N, K],
        float32 [N, 1]."""
        if norm is not None:
            x = self.rms_norm(*norm, x.dtype)(x)
        result = int8.product(x if gate is None else self.gated(gate)(x), weight, scales)
        if gate_after is not None:
            result = self.gated(gate_after)(result)
        return result if add_to is None else add_to.add_(result)

    def weight_product(self, weight: Tensor, scales: Tensor) -> int8.WeightProduct:
        """The product with an int8 weight [N, K] by scales, float32 [N, 1], which float16 holds. It may hold them otherwise."""
        return partial(int8.weight_product, weight=weight, scales=scales)

    def scaled_product(self, x: Float8, weight: Float8, dtype: torch.dtype, *, exact: bool) -> Tensor:
        """``x @ weight`` of float8 numbers by the device's matrix units: [T, N] of ``dtype``.

        Args:
            x: [T, K] as this object quantised it.
            weight: [K, N], the view of a contiguous [N, K]; scales [1, N], [1, 1], or [K / 128, N / 128] by block, views as well.
            dtype: The result's.
            exact: Whether products are summed in float32 throughout.

        Raises:
            RuntimeError: It has none that take such scales.
        """
        raise RuntimeError("this device multiplies no float8 numbers")

    def quantise(self, x: Tensor, *, grouped: bool) -> Float8:
        """Rows [T, K] to float8, by a scale for each, or for each :data:`GROUP` numbers. The results may have more rows."""
        return reference.quantise_rows(x, GROUP if grouped else None)

    def quantise_normed(self, x: Tensor, weight: Tensor, eps: float, *, grouped: bool) -> Float8:
        """:meth:`quantise` after ``reference.rms_norm`` by a float32 weight [K]."""
        return self.quantise(reference.rms_norm(x, weight, eps), grouped=grouped)

    def quantise_gated(self, gate_up: Tensor, gate: Gate, *, grouped: bool) -> Float8:
        """:meth:`quantise` after the gated activation: [T, 2K] -> [T, K]."""
        return self.quantise(self.gated(gate)(gate_up), grouped=grouped)

    # Operations that are functions of tensors alone; a device's class has its own in their place.

    gated_norm = staticmethod(gated_norm)
    """The norm behind the heads of a state, and its gate."""
    quantise_tensor = staticmethod(reference.quantise_tensor)
    """[T, K] to float8 by one scale, [1, 1]."""
    row_max = staticmethod(cpu_sampling.row_max)
    """Each row's maximum, NaN if the row holds one, and its first index, -1 if it is not finite: ``max(-1)``."""
    draw_rows = staticmethod(cpu_sampling.draw_rows)
    """A token of each row by its request's settings, and its likeliest one; what a graph may hold."""
    sample_rows = staticmethod(cpu_sampling.sample_rows)
    """A token of each row that is sampled; in a row that holds a NaN, or nothing to choose, any token. Changes nothing."""
    forbid_tokens = staticmethod(cpu_sampling.apply_token_bitmask)
    """Works in place; rows of the logits and the whole bitmask are contiguous."""
    apply_penalties = staticmethod(reference.apply_penalties)
    """Works in place, on contiguous tensors; the penalties share a stride."""
    count_tokens = staticmethod(reference.count_tokens)
    """Works in place, on contiguous tensors."""
    add_digest = staticmethod(reference.add_digest)
    """Works in place on the total."""
