"""A CUDA GPU's operations. Imported only where there is one: other builds of torch bring no Triton."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sapwood_kernels import (
    triton_activation,
    triton_angles,
    triton_digest,
    triton_float8,
    triton_gemv,
    triton_norm,
    triton_rows,
)
from sapwood_kernels.experts import triton_experts, triton_many_float8, triton_many_tokens, triton_routing
from sapwood_kernels.experts.reference import ClampedGate
from sapwood_kernels.experts.routing import Routing
from sapwood_kernels.experts.stack import DenseStack, ExpertStack, StoredStack, in_few_bits
from sapwood_kernels.experts.tiles.plan import FEW_TOKENS, TileTable
from sapwood_kernels.experts.tiles.tuning import tuned
from sapwood_kernels.experts.triton_timing import ProductTimer
from sapwood_kernels.latent import triton_absorb, triton_expand, triton_heads, triton_many_heads
from sapwood_kernels.latent.triton_store import store_latent
from sapwood_kernels.lora.cuda_slots import CudaLoraSlots
from sapwood_kernels.ops.contracts import (
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
    StoreHeads,
    StoreLatent,
)
from sapwood_kernels.ops.device import CudaSideQueue, DeviceOps, Fence, HostCopies, Moment, ResultT, SideQueue
from sapwood_kernels.quantised import (
    triton_digits,
    triton_few,
    triton_grouped,
    triton_int8,
    triton_many,
    triton_one,
    triton_row,
)
from sapwood_kernels.quantised.grouped import GroupedWeight
from sapwood_kernels.quantised.int8 import WeightProduct
from sapwood_kernels.rotary_pairs import RotaryPairs
from sapwood_kernels.sampling import triton_logits, triton_sampling
from sapwood_kernels.state.triton_copy import copy_states
from sapwood_kernels.state.triton_gated_norm import gated_norm
from sapwood_kernels.state.triton_prompts import TritonPrompts
from sapwood_kernels.state.triton_steps import TritonStateSteps
from sapwood_kernels.triton_qkv import norm_rope_store

logger = logging.getLogger(__name__)

# Elements of the widest row that our kernel multiplies, whose steps the compiler unrolls: 28 against cuBLAS's 32 us for
# 4096 x 14336 on an H200.
_WIDEST_ROW = 16384
_ROUNDING = 0.02
"""Most that three products together may differ from another kernel's, relative to their size; bfloat16 rounds by 0.002."""
_MANY_TOKENS = ((triton_many_tokens, DenseStack), (triton_many_float8, StoredStack))
"""Kernels of a Hopper GPU for experts with many tokens, and their limits."""
_ALL_CORES = 32768
"""Numbers from which torch has all cores copy a part, and numpy one. A step that waited for each of them took 13 to 30 ms
while compilers had the cores."""
_ALL = (1 << 31) - 1
"""More rows than a step has."""


def _pinned(array: npt.NDArray[np.generic]) -> Tensor:
    """A copy in pinned memory: one from other memory would wait for all that is queued on the device."""
    source = torch.from_numpy(array)
    if array.size < _ALL_CORES:
        return source.pin_memory()
    pinned = torch.empty_like(source, pin_memory=True)
    np.copyto(pinned.numpy(), array)
    return pinned


class _CudaFence(Fence):
    def __init__(self) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def set(self) -> None:
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()


class _CudaMoment(Moment):
    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record()

    def seconds_since(self, earlier: Moment) -> float:
        assert isinstance(earlier, _CudaMoment)
        return float(earlier._event.elapsed_time(self._event)) / 1000


class CudaOps(DeviceOps):
    """Kernels of our own and of torch; all work is queued on the current stream."""

    asynchronous = True
    captures = True
    multiplies_groups = True
    groups_experts = True
    joins_shared = True
    moment = _CudaMoment
    lora_multiple = 16
    state_steps = TritonStateSteps()

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.state_prompts = TritonPrompts()
        self._tune: tuple[float, Path] = (0.0, Path())
        self._tables: dict[str, TileTable] = {}
        self._live: dict[int, Tensor] = {}
        self._hopper = False
        self._aside: torch.cuda.Stream | None = None
        self._tried: dict[tuple[object, ...], bool] = {}
        self._told: set[str] = set()
        if torch.cuda.is_available():  # else Triton's interpreter stands in
            properties = torch.cuda.get_device_properties(device)
            self.processors = properties.multi_processor_count
            self._hopper = torch.version.hip is None and properties.major == 9

    def to_device(self, array: npt.NDArray[np.generic]) -> Tensor:
        return _pinned(array).to(self.device, non_blocking=True)

    def fill(self, target: Tensor, array: npt.NDArray[np.generic]) -> None:
        target.copy_(_pinned(array), non_blocking=True)

    def copy_states(self, states: Tensor, pairs: Tensor) -> None:
        copy_states(states, pairs)

    def to_host(self, tensors: Sequence[Tensor]) -> HostCopies:
        if not tensors:
            return super().to_host(tensors)
        copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]  # torch takes pinned memory
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return HostCopies(copies, event.synchronize, event.query)

    def aside(self, read: Callable[[], ResultT]) -> ResultT:
        self._aside = self._aside or torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._aside):
            return read()

    def fence(self) -> Fence:
        return _CudaFence()

    def side_queue(self) -> SideQueue:
        return CudaSideQueue(self.device)

    def lora_slots(self, slots: int, rank: int, dtype: torch.dtype) -> CudaLoraSlots:
        return CudaLoraSlots(slots, dtype, self.gated, self.device, rank, self.fill)

    def rms_norm(self, weight: Tensor, eps: float, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        return partial(triton_norm.rms_norm, weight=weight, eps=eps)

    def add_normed(self, x: Tensor, residual: Tensor, norm: Norm) -> Tensor | None:
        if x.dtype != residual.dtype or not (x.is_contiguous() and residual.is_contiguous()):
            return super().add_normed(x, residual, norm)
        return triton_norm.add_rms_norm(x, residual, norm.weight, norm.eps)

    def angles(self, table: Tensor, positions: Tensor, pairs: RotaryPairs) -> tuple[Tensor, Tensor]:
        return triton_angles.spread_angles(table, positions, pairs)

    def gated(self, gate: Gate) -> Callable[[Tensor], Tensor]:
        return triton_activation.silu_mul if gate == "silu" else triton_activation.gelu_tanh_mul

    def store_heads(
        self,
        num_heads: int,
        num_kv_heads: int,
        norm: tuple[Tensor, Tensor, float] | None,
        dtype: torch.dtype,
        pairs: RotaryPairs | None = None,
    ) -> StoreHeads:
        weights, eps = (None, 0.0) if norm is None else (norm[:2], norm[2])
        store = partial(norm_rope_store, num_heads=num_heads, norm_weights=weights, eps=eps, pairs=pairs)
        return lambda qkv, cos, sin, to: store(qkv, cos, sin, to.keys, to.values, to.slots, to.scales)

    def store_latent(self, weight: Tensor, eps: float, dtype: torch.dtype, *, interleaved: bool) -> StoreLatent:
        return partial(store_latent, weight=weight, eps=eps, interleaved=interleaved)

    def store_absorbed(self, weight: Tensor, eps: float, up: Tensor, *, interleaved: bool) -> StoreAbsorbed:
        store = partial(triton_absorb.store_absorbed, weight=weight, eps=eps, up=up, interleaved=interleaved)
        return StoreAbsorbed(store, triton_absorb.MOST)

    def latent_products(self, up: Tensor, nope: int) -> LatentProducts:
        def absorb(query: Tensor) -> Tensor:
            few = len(query) <= triton_heads.MOST
            return (triton_heads.absorb if few else triton_many_heads.absorb)(query, up, nope)

        def values(latent: Tensor) -> Tensor:
            few = len(latent) <= triton_heads.MOST
            return (triton_heads.values if few else triton_many_heads.values)(latent, up, nope)

        return LatentProducts(absorb, values, triton_many_heads.MOST, partial(triton_expand.expand, up=up, nope=nope))

    def one_row(self, weight: Tensor, bias: Tensor | None = None, scales: Tensor | None = None) -> OneRow | None:
        if weight.shape[1] > _WIDEST_ROW and scales is None:
            return None
        return partial(triton_gemv.gemv, weight=weight, bias=bias, scales=scales)

    def few_rows(self, weight: Tensor, bias: Tensor | None) -> FewRows | None:
        found = triton_rows.few_rows(weight) if self._hopper and bias is None else None
        return None if found is None else FewRows(*found, norm=0)

    def grouped(self, weight: GroupedWeight) -> Callable[[Tensor], Tensor]:
        if not triton_grouped.serves(weight):
            return super().grouped(weight)
        product = partial(triton_grouped.product, weight=weight, processors=self.processors)
        if not self._hopper or not triton_many.serves(weight, torch.bfloat16):
            return product
        many = partial(triton_many.product, weight=weight, processors=self.processors)
        return lambda x: (many if triton_many.takes(x) else product)(x)

    def grouped_few(self, weight: GroupedWeight, bias: Tensor | None, dtype: torch.dtype) -> FewRows | None:
        if self._hopper and triton_few.serves(weight, dtype):
            one = int(triton_one.serves(weight, dtype) and self._says_the_same(weight, dtype))

            def product(x: Tensor, **others: Any) -> Tensor:
                kernel = triton_one.one_row if len(x) <= one else triton_few.few_rows
                return kernel(x, weight, bias=bias, **others)

            return FewRows(product, triton_few.MOST, norm=one)
        if not triton_row.serves(weight):
            return None
        return FewRows(partial(triton_row.row_product, weight=weight, bias=bias), 1, norm=1)

    def grouped_many(self, weight: GroupedWeight, dtype: torch.dtype) -> ManyRows | None:
        if not self._hopper or not triton_many.serves(weight, dtype):
            return None
        return ManyRows(partial(triton_many.product, weight=weight, processors=self.processors), triton_many.MOST)

    def _says_the_same(self, weight: GroupedWeight, dtype: torch.dtype) -> bool:
        """Whether the kernel of one row computes what that of a few does; tried once for each kind of weight."""
        held = (weight.codes, weight.scales, weight.zeros, weight.factors)
        kind = (dtype, *(None if each is None else (each.dtype, each.shape) for each in held))
        if kind not in self._tried:
            x = torch.randn(1, weight.columns, dtype=dtype, device=weight.codes.device)
            wanted = triton_few.few_rows(x, weight).float()
            try:
                # After each other, as in a step: none waits for the end of the one ahead before it reads its weight.
                error = sum(float((triton_one.one_row(x, weight) - wanted).norm()) for _ in range(3))
            except Exception as reason:
                logger.warning("a row alone is multiplied by the kernel of few rows: %s", reason)
                error = float("inf")
            self._tried[kind] = error < _ROUNDING * float(wanted.norm())
            logger.info("a row alone has a kernel of its own for %s: %s", list(weight.codes.shape), self._tried[kind])
        return self._tried[kind]

    def tune_experts(self, seconds: float, folder: Path) -> None:
        self._tune = seconds, folder

    def _tiles(
        self,
        gate_up: DenseStack | StoredStack,
        down: DenseStack | StoredStack,
        chosen: int,
        gate: Gate | ClampedGate,
        shared: int,
    ) -> TileTable:
        """The tiles of a kind of layer, measured once."""
        experts, (seconds, folder) = gate_up.experts, self._tune
        stored = in_few_bits(gate_up, down)
        modelled = TileTable(experts, stored=stored, filled=FEW_TOKENS * chosen if shared else 0)
        if not seconds:
            return modelled
        held = gate_up.weight if isinstance(gate_up, DenseStack) else gate_up.codes
        # A GGUF file may have matrices in few bits and others that are widened, and not the same ones in each layer.
        kind = "+".join(dict.fromkeys(map(_kind, (gate_up, down))))
        of = f"{chosen}of{experts}-{shared}" if shared else f"{chosen}of{experts}"
        parts = (  # the last one counts changes of the candidates: tiles measured among others do not hold
            torch.cuda.get_device_name(self.device), of, f"{gate_up.outputs}x{down.outputs}", kind,
            f"triton{version('triton')}", "6",
        )  # fmt: skip
        name = re.sub(r"[^\w.-]+", "_", "-".join(map(str, parts)))
        if name not in self._tables:
            dtype = held.dtype if held.dtype.itemsize > 1 else torch.bfloat16
            timer = ProductTimer(gate_up, down, chosen, dtype, gate, shared)
            found, self.tuning = tuned(experts, chosen, timer, folder / f"{name}.json", seconds, stored=stored)
            self._tables[name] = replace(modelled, measured=found.measured)
        return self._tables[name]

    def expert_sum(
        self, gate_up: ExpertStack, down: ExpertStack, gate: Gate | ClampedGate, chosen: int, shared: int = 0
    ) -> ExpertSum:
        known = DenseStack | StoredStack
        if not isinstance(gate_up, known) or not isinstance(down, known):
            return super().expert_sum(gate_up, down, gate, chosen, shared)
        if isinstance(gate_up, StoredStack) and gate_up.rounds and gate_up.rounds not in self._told:
            self._told.add(gate_up.rounds)
            each = "row" if gate_up.rounds == "row" else "128 of a row"
            logger.info("experts: inputs are rounded to 8 bits where that pays, by a scale for each %s", each)
        tiles = self._tiles(gate_up, down, chosen, gate, shared).plan
        summed = partial(triton_experts.expert_sum, gate_up=gate_up, down=down, gate=gate, tiles=tiles)
        for kernel, kind in _MANY_TOKENS:
            if self._hopper and isinstance(gate_up, kind) and isinstance(down, kind) and kernel.serves(gate_up, down):
                break
        else:
            return summed
        many = partial(kernel.expert_sum, gate_up=gate_up, down=down, gate=gate, processors=self.processors)

        def either(x: Tensor, ids: Tensor, weights: Tensor, /, *, add_to: Tensor | None = None) -> Tensor:
            takes = x.dtype.itemsize == 2 and kernel.takes(ids.numel(), gate_up.experts)
            return (many if takes else summed)(x, ids, weights, add_to=add_to)

        return either

    def router_logits(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        narrow = triton_routing.narrowed(weight, dtype) if weight.is_cuda and torch.version.cuda is not None else None
        return partial(triton_routing.logits, weight=weight, bias=bias, narrow=narrow)

    def normed_logits(self, weight: Tensor, bias: Tensor | None) -> NormedLogits:
        product = partial(triton_routing.normed_logits, weight=weight, bias=bias)
        return NormedLogits(product, triton_routing.FEW)

    def router(self, routing: Routing, correction: Tensor | None, counts: Tensor, ranks: int = 1) -> RouteTokens:
        live = self._live.setdefault(ranks, torch.full((ranks,), _ALL, dtype=torch.int32, device=self.device))
        choose = partial(triton_routing.route, routing=routing, correction=correction, counts=counts)
        return lambda logits, first=0: choose(logits, live=live - first if first else live)

    @contextmanager
    def padded(self, tokens: int, of_ranks: Sequence[int] = ()) -> Iterator[None]:
        for ranks, live in self._live.items():
            if ranks == 1:
                live.fill_(tokens)
            elif of_ranks:
                self.fill(live, np.array(of_ranks, np.int32))
        yield
        for live in self._live.values():
            live.fill_(_ALL)

    turns = staticmethod(triton_routing.turns)

    def int8_product(self, x: Tensor, weight: Tensor, scales: Tensor, **others: Any) -> Tensor:
        return triton_int8.product(x, weight, scales, self.processors, **others)

    def weight_product(self, weight: Tensor, scales: Tensor) -> WeightProduct:
        if not triton_digits.serves(weight):
            return super().weight_product(weight, scales)
        return partial(triton_digits.product, weight=weight, scales=scales)

    def scaled_product(self, x: Float8, weight: Float8, dtype: torch.dtype, *, exact: bool) -> Tensor:
        return torch._scaled_mm(
            x[0], weight[0], scale_a=x[1], scale_b=weight[1], out_dtype=dtype, use_fast_accum=not exact
        )

    def quantise(self, x: Tensor, *, grouped: bool) -> Float8:
        return triton_float8.quantise(x, grouped=grouped)

    def quantise_normed(self, x: Tensor, weight: Tensor, eps: float, *, grouped: bool) -> Float8:
        return triton_float8.rms_norm(x, weight, eps, grouped=grouped)

    def quantise_gated(self, gate_up: Tensor, gate: Gate, *, grouped: bool) -> Float8:
        return triton_float8.gated(gate_up, gate, grouped=grouped)

    gated_norm = staticmethod(gated_norm)
    quantise_tensor = staticmethod(triton_float8.quantise_tensor)
    row_max = staticmethod(triton_logits.row_max)
    draw_rows = staticmethod(triton_sampling.draw_rows)
    sample_rows = staticmethod(triton_sampling.sample_rows)
    forbid_tokens = staticmethod(triton_logits.apply_token_bitmask)
    apply_penalties = staticmethod(triton_logits.apply_penalties)
    count_tokens = staticmethod(triton_logits.count_tokens)
    add_digest = staticmethod(triton_digest.add_digest)


def _kind(stack: DenseStack | StoredStack) -> str:
    """The number format of experts' matrices, for a file's name."""
    if isinstance(stack, StoredStack) and stack.integers:
        return f"int{stack.integers}"
    if isinstance(stack, DenseStack):
        return str(stack.weight.dtype)
    return f"{stack.codes.dtype}{'-blocks' * (stack.rounds == 'block')}"
