"""The interface of attention backends.

A backend computes one half of a step, or both: *prefill*, chunks of prompts, and *decode*, one token of each request. The two may
come from different backends (``registry.py`` chooses); ``paged.py`` joins them.

In shapes: T tokens of a step, B requests, H query heads, K key/value heads, D elements of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sapwood_kernels.attention.latent.heads import LatentHeads
from sapwood_kernels.attention.planned import AttentionShape, PagedKeys, SharedRuns, Variant
from sapwood_kernels.kv_destination import KVDestination
from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.pools.device_pool import DevicePool
from sapwood_worker.model.pools.state_pool import StatePlan
from sapwood_worker.settings import Half

WHOLE_CHUNKS = 1 << 30
"""The tile size larger than any chunk: each key is read once for each request."""


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """The constants of one layer's attention.

    Attributes:
        index: The pool's layer that it reads and writes.
        scale: Factor of query-key products.
        window: Positions a token sees, itself included; None for all before it.
        chunked: Whether a token sees instead the positions from the latest multiple of ``window`` on, at most ``window``.
        softcap: Products become ``softcap * tanh(product / softcap)``; None: they stay.
        sinks: float32 [H]: for each head a product that takes part in the softmax and has no value; None: there are none.
        latent: The heads of latent attention; None: the cache holds keys and values of heads.
    """

    index: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = field(default=None, compare=False)
    latent: LatentHeads | None = None
    chunked: bool = False

    @property
    def kind(self) -> Variant:
        """The constants that layers of one kind share."""
        return Variant(self.scale, self.window, self.softcap, self.sinks is not None, self.chunked)

    def oldest_seen(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The first position that the token at each of some positions sees."""
        if self.window is None:
            return np.zeros_like(positions)
        return positions // self.window * self.window if self.chunked else np.maximum(positions + 1 - self.window, 0)

    def empty_result(self, query: Tensor) -> Tensor:
        """A new tensor [T, H, values' D] for what attention returns of queries [T, H, D]."""
        dim = query.shape[2] if self.latent is None else self.latent.value_dim
        return query.new_empty(*query.shape[:2], dim)


@dataclass(frozen=True, slots=True)
class PromptOrder:
    """Requests ordered so that requests with the same first keys are neighbours.

    Attributes:
        order: The requests.
        common: How many first keys each request shares with the one before it in that order.
    """

    order: list[int]
    common: list[int]


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Which tokens of a step belong to which request, and where the cache keeps their keys and values. On the host.

    Attributes:
        query_starts: int64 [B + 1]: request i's tokens are rows ``query_starts[i]`` .. ``query_starts[i + 1] - 1``; each
            has at least one.
        seq_lens: int64 [B]: keys of each request once this step's are written.
        page_table: int32 [B, P]: pages of each request in order; entries beyond its last page are undefined.
        cache_slots: int64 [T] on the device: where each token's key and value go.
        keys: The pages as kernels read them, on the device; None unless a backend ``reads_keys``.
        windows: The same step in the page table of each further group of the cache's layout.
        runs: The keys before the computed tokens that requests share, if these are read once.
        prompts: The order of requests whose common keys are expanded once; only for a backend that ``orders_prompts``.
        states: The step's way through the states of layers that keep one; None: no layer does.
        reach: int64 [T]: the position of the last key that each token sees; None: its own. Only for the backend ``torch``.
    """

    query_starts: npt.NDArray[np.int64]
    seq_lens: npt.NDArray[np.int64]
    page_table: npt.NDArray[np.int32]
    cache_slots: Tensor
    keys: PagedKeys | None = None
    windows: tuple[AttentionBatch, ...] = ()
    runs: SharedRuns | None = None
    prompts: PromptOrder | None = None
    states: StatePlan | None = None
    reach: npt.NDArray[np.int64] | None = None

    @property
    def tables(self) -> tuple[AttentionBatch, ...]:
        """The step in each page table."""
        return (self, *self.windows)

    def split(self, count: int) -> tuple[AttentionBatch, AttentionBatch]:
        """The first ``count`` requests, which have all ``runs``, and the others."""
        row = int(self.query_starts[count])
        first, rest = (None, None) if self.keys is None else self.keys.split(count)
        windows = [window.split(count) for window in self.windows]
        near, far = (None, None) if self.reach is None else (self.reach[:row], self.reach[row:])
        return (
            replace(
                self, query_starts=self.query_starts[: count + 1], seq_lens=self.seq_lens[:count],
                page_table=self.page_table[:count], cache_slots=self.cache_slots[:row], keys=first,
                windows=tuple(each for each, _ in windows), reach=near,
            ),
            replace(
                self, query_starts=self.query_starts[count:] - row, seq_lens=self.seq_lens[count:],
                page_table=self.page_table[count:], cache_slots=self.cache_slots[row:], keys=rest,
                windows=tuple(each for _, each in windows), runs=None, reach=far,
            ),
        )  # fmt: skip


def in_tables(batches: Sequence[AttentionBatch]) -> AttentionBatch:
    """Joins a step's batches, one for each page table, into one value."""
    return batches[0] if len(batches) == 1 else replace(batches[0], windows=tuple(batches[1:]))


class AbsorbedAttention(Protocol):
    """Attention of decodes whose latent queries are already absorbed, so that they multiply cached vectors directly."""

    def attend_absorbed(self, layer: AttentionLayer, query: Tensor) -> Tensor:
        """:meth:`AttentionPlan.attend_cached` of queries [T, H, R + E], as ``LatentHeads.absorb`` makes them: [T, H, V]."""
        ...


class AttentionPlan(Protocol):
    """A planned step, as layers see it: a layer writes its keys and values to ``destination``, then calls ``attend_cached``.

    All work is queued on the device's current stream; a result is valid for what is queued after it.
    """

    @property
    def states(self) -> StatePlan | None:
        """The step's way through the states of layers that keep one; None: no layer does."""
        ...

    @property
    def absorbed(self) -> AbsorbedAttention | None:
        """The attention that a latent layer may call instead of ``attend_cached``, with all queries absorbed; None: there is
        none."""
        ...

    def destination(self, layer: AttentionLayer) -> KVDestination:
        """Where a layer's keys and values of this step go; waits, on the device, for pages of that layer still being loaded."""
        ...

    def attend_cached(self, layer: AttentionLayer, query: Tensor) -> Tensor:
        """Attends over everything cached, this step's keys and values included.

        Mutates nothing. The result is a new tensor, or the memory of a graph that is being captured.

        Args:
            layer: The layer's constants.
            query: [T, H, D], rotated.

        Returns:
            [T, H * values' D].
        """
        ...


class StepAttention(Protocol):
    """One half of attention, as a backend computes it."""

    def plan(self, batch: AttentionBatch) -> None:
        """Prepares a step; its layers then share the plan, which is valid until the next call.

        Does not mutate the batch. May keep and mutate buffers of its own. The caller may change the batch as soon as the call has
        returned and later work is queued: data that the device will copy must be in this object's memory by then, or be read
            first.
        """
        ...

    def attend(self, layer: AttentionLayer, query: Tensor, out: Tensor | None = None) -> Tensor:
        """Attends over the planned requests' cached keys and values in a layer, on the device's current stream.

        Mutates nothing but ``out``, and does not wait for the device.

        Args:
            layer: The layer's constants; its ``kind`` is one of those that the backend was made for.
            query: [T, H, D] of the planned tokens.
            out: [T, H, values' D], contiguous: the result is written here. None: to a new tensor.

        Returns:
            ``out`` if it was given, else [T, H, values' D] or [T, H * values' D]; valid for what is queued after it.
        """
        ...


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """The requirements of a model on its attention. Attributes: shape: The shape that all layers share.
    cache_dtype: The dtype in which keys and values are stored.
    kinds: The distinct kinds of layer.
    longest: Tokens of the longest request.
    latent: Whether the layers' attention is latent: ``shape`` then has the cached vector as the one key head.
    """

    shape: AttentionShape
    cache_dtype: torch.dtype
    kinds: tuple[Variant, ...]
    longest: int
    latent: bool = False


@dataclass(frozen=True, slots=True)
class AttentionParts:
    """The inputs from which a backend is made.

    Attributes:
        needs: What the model asks.
        pool: Keys and values.
        ops: The device's operations.
        indices: int32 buffer on the device: every step's ``PagedKeys.indices`` lie at its beginning; empty if nothing reads
            keys.
        shared: Objects that a backend shares between all page tables and both halves of a model, under its own names; one plan's
            layers are computed one after the other.
    """

    needs: AttentionNeeds
    pool: DevicePool
    ops: DeviceOps
    indices: Tensor
    shared: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a backend can do; :meth:`refusal` is asked before it is made.

    Attributes:
        dtypes: Dtypes that queries may have.
        cache_dtypes: Dtypes of the cache besides the queries' own.
        head_dims: Elements of a head; None: any.
        windows: Whether layers may have a window.
        softcap: Whether scores may be capped.
        sinks: Whether heads may have sinks.
        chunks: Whether layers may see chunks.
        device: Why it cannot run on a device, for example "it needs a GPU"; None: it can.
    """

    dtypes: frozenset[torch.dtype]
    cache_dtypes: frozenset[torch.dtype] = frozenset()
    head_dims: frozenset[int] | None = None
    windows: bool = True
    softcap: bool = True
    sinks: bool = False
    chunks: bool = False
    device: Callable[[DeviceOps], str | None] = lambda ops: None

    def refusal(self, needs: AttentionNeeds, ops: DeviceOps) -> str | None:
        """Why it cannot serve a model on a device, in words that name the requirement; None: it can."""
        shape, dtype = needs.shape, needs.shape.dtype
        unfit = self.device(ops)
        if unfit is not None:
            return unfit
        if dtype not in self.dtypes:
            return f"it takes {_names(self.dtypes)}, not {_name(dtype)}"
        if needs.cache_dtype not in {dtype, *self.cache_dtypes}:
            return f"it reads no cache of {_name(needs.cache_dtype)}"
        if self.head_dims is not None and shape.head_dim not in self.head_dims:
            return f"it takes heads of {', '.join(map(str, sorted(self.head_dims)))} elements, not {shape.head_dim}"
        if not self.windows and any(kind.window is not None for kind in needs.kinds):
            return "it has no sliding windows"
        if not self.softcap and any(kind.softcap is not None for kind in needs.kinds):
            return "it does not cap scores"
        if not self.sinks and any(kind.sinks for kind in needs.kinds):
            return "it has no attention sinks"
        if not self.chunks and any(kind.chunked for kind in needs.kinds):
            return "it has no chunks (attention that begins again)"
        return None


@dataclass(frozen=True, slots=True)
class AttentionBackend:
    """A way to compute attention, under its name in ``registry.py``.

    Attributes:
        abilities: What it can do.
        prefill: Makes the attention of any ragged batch; None: it has none.
        decode: Makes the attention of one token for each of any number of requests; None: it has none.
        graphs: Makes the factory of attention for a number of decodes that a CUDA graph can capture: ``plan`` writes to the
            addresses that a captured ``attend`` reads. None: steps run without graphs.
        shared: Likewise for decodes that share keys (``AttentionBatch.runs``), for the given number of decodes or, with None, for
            any number. It may return None for a model that it cannot serve. It is captured only with ``graphs``. None: each
            request reads its keys by itself.
        shared_prompts: Makes the attention for chunks of prompts, some of which share keys, likewise; not called for latent
            attention. None: each request reads its keys by itself.
        prompt_tile: Tokens of a request that read keys together, without ``shared_prompts``.
        reads_keys: Whether it reads ``AttentionBatch.keys``.
        latent: Which halves of latent attention it also computes.
        orders_prompts: Whether its prefill expands latent keys only once if neighbours in ``AttentionBatch.prompts`` share them.
        plans_from: The least number of tokens of an unchunked prompt whose attention cuDNN plans, at the first prompt of each
            length (``cudnn_lengths``); None: it never uses cuDNN.
    """

    abilities: Abilities
    prefill: Callable[[AttentionParts], StepAttention] | None = None
    decode: Callable[[AttentionParts], StepAttention] | None = None
    graphs: Callable[[AttentionParts], Callable[[int], StepAttention]] | None = None
    shared: Callable[[AttentionParts], Callable[[int | None], StepAttention] | None] | None = None
    shared_prompts: Callable[[AttentionParts], StepAttention] | None = None
    prompt_tile: Callable[[AttentionNeeds], int] = lambda needs: WHOLE_CHUNKS
    reads_keys: bool = True
    latent: frozenset[Half] = frozenset()
    orders_prompts: bool = False
    plans_from: Callable[[AttentionParts], int | None] = lambda parts: None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _names(dtypes: frozenset[torch.dtype]) -> str:
    return " and ".join(sorted(map(_name, dtypes)))
