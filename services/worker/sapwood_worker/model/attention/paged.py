"""Paged attention with kernels that are planned once a step, and the search for prefixes that requests share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sapwood_kernels.attention.latent.heads import PlannedLatentAttention
from sapwood_kernels.attention.planned import (
    AdvancingAttention,
    IntArray,
    PagedKeys,
    PlannedAttention,
    SharedRuns,
    StoredPages,
    Variant,
)
from sapwood_kernels.kv_destination import KVDestination
from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.attention.backend import (
    AttentionBackend,
    AttentionBatch,
    AttentionLayer,
    AttentionNeeds,
    AttentionParts,
    PromptOrder,
    StepAttention,
    in_tables,
)
from sapwood_worker.model.pools.device_pool import DevicePool
from sapwood_worker.model.pools.state_pool import StatePlan

# Finds which requests of a step share which pages, in their page tables: every row that uses a page of the prefix cache
# names it. So all ranks of a group find the same sharing, and a step need not name it.


Runs = tuple[SharedRuns | None, ...]
"""The shared runs of pages in each page table."""

LEAST_SPARED = 8192
"""Sharing pays only if it saves reading this many keys: reading them takes as long as the additional kernel in each layer."""
_LEAST_RUN = 128
"""The fewest keys of a shared run that is read separately."""
_LEVELS = 8
"""The most branchings along a request's prefix; below the last one, each request reads its own keys."""


class _Found:
    """The sharing in a page table, valid while its requests stay the same.

    Args:
        table: The page table.
        page_size: Tokens in a page.
        whole: int64 [B]: how many full pages of each request others may share. runs: The shared runs; None: there are none.
    """

    def __init__(self, table: npt.NDArray[np.int32], page_size: int, whole: IntArray, runs: SharedRuns | None) -> None:
        self.runs = runs
        self._longest = -(-_LEAST_RUN // page_size)
        if runs is None:  # two requests with this many common pages would have a run
            self._ends = np.minimum(whole, self._longest)
        else:
            self._ends = np.zeros(len(table), np.int64)
            for first, count, end in zip(runs.first, runs.count, runs.end // page_size, strict=True):
                self._ends[runs.order[first : first + count]] = end
        columns = int(self._ends.max())
        # A request that shares nothing is identified by its first page, so that a new request in its place is noticed.
        self._others = np.arange(columns) >= np.maximum(self._ends, 1)[:, None]
        self._pages = table[:, :columns].copy()

    def holds(self, table: npt.NDArray[np.int32], whole: IntArray) -> bool:
        """Whether the requests still share these runs. If a new request in an old one's place shares more, that is ignored."""
        count, columns = self._pages.shape
        if len(table) != count or table.shape[1] < columns or (whole < self._ends).any():
            return False
        if self.runs is None and (np.minimum(whole, self._longest) > self._ends).any():
            return False
        return bool(((table[:, :columns] == self._pages) | self._others).all())


class SharedPrefixes:
    """Finds the pages that the requests of a step share, and counts savings. A result is valid until a request starts or ends.

    Args:
        page_size: Tokens in a page.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._spared = 0
        self._last: dict[int, _Found] = {}

    def find(self, tables: Sequence[npt.NDArray[np.int32]], lengths: IntArray) -> Runs | None:
        """The pages that decoding requests share in each page table; None if sharing does not pay.

        Args:
            tables: int32 [B, P], as :class:`AttentionBatch` has them; the first decides.
            lengths: int64 [B]: keys of each request, or 1 for one that reads by itself.
        """
        if int(lengths.sum()) <= LEAST_SPARED:
            return None
        first = self._find(0, tables[0], lengths)
        if first is None or first.spared < LEAST_SPARED:
            return None
        self._spared += first.spared
        return first, *(self._find(i, table, lengths) for i, table in enumerate(tables[1:], 1))

    def find_prompts(
        self, tables: Sequence[npt.NDArray[np.int32]], starts: IntArray, tokens: IntArray, tile: int
    ) -> Runs | None:
        """The pages that requests share before their computed tokens; None if sharing does not pay.

        Args:
            tables: As for :meth:`find`.
            starts: int64 [B]: keys before the first of each request's tokens.
            tokens: int64 [B]: how many tokens are computed of each.
            tile: Tokens that read keys together: requests share for fewer tiles, not only for fewer readers.
        """
        if int(starts.sum()) <= LEAST_SPARED:
            return None
        first = find_runs(tables[0], starts + 1, self._page_size)
        if first is None:
            return None
        order = tokens[first.order]
        members = [order[begin : begin + count] for begin, count in zip(first.first, first.count, strict=True)]
        tiles = np.array([int((-(-each // tile)).sum()) + int(-each.sum() // tile) for each in members])
        if int((tiles * (first.end - first.begin)).sum()) < LEAST_SPARED:
            return None
        self._spared += first.spared
        return first, *(find_runs(table, starts + 1, self._page_size) for table in tables[1:])

    def order(self, table: npt.NDArray[np.int32], lengths: IntArray) -> PromptOrder | None:
        """An order of prompts that puts prompts with the same first keys side by side; None if no prompts share keys. O(pages).

        Args:
            table: int32 [B, P], as :class:`AttentionBatch` has it.
            lengths: int64 [B]: keys of each request.
        """
        whole = lengths // self._page_size
        begins = table[whole > 0, 0]
        if len(np.unique(begins)) == len(begins):
            return None
        pages = [row[:count] for row, count in zip(table, whole.tolist(), strict=True)]
        order = sorted(range(len(pages)), key=lambda i: pages[i].tolist())
        common = [0]
        for before, after in itertools.pairwise(order):
            alike = min(len(pages[before]), len(pages[after]))
            other = np.flatnonzero(pages[before][:alike] != pages[after][:alike])
            count = (int(other[0]) if len(other) else alike) * self._page_size
            common.append(count if count >= _LEAST_RUN else 0)
        self._spared += sum(common)
        return PromptOrder(order, common) if any(common) else None

    def take(self) -> int:
        """How many keys each layer has not read again since the last call, because another request of the step shares them."""
        spared, self._spared = self._spared, 0
        return spared

    def _find(self, group: int, table: npt.NDArray[np.int32], lengths: IntArray) -> SharedRuns | None:
        last, whole = self._last.get(group), (lengths - 1) // self._page_size
        if last is not None and last.holds(table, whole):
            return last.runs
        runs = find_runs(table, lengths, self._page_size)
        self._last[group] = _Found(table, self._page_size, whole, runs)
        return runs


def find_runs(table: npt.NDArray[np.int32], lengths: IntArray, page_size: int) -> SharedRuns | None:
    """The pages that requests share from their first page on; None: none.

    A batch that shares nothing costs one sort of its first pages. Else it costs O(pages of the requests that share) for each
    level of branchings, vectorised over the requests.

    Args:
        table: int32 [B, P]: each request's pages in order; entries beyond its last are undefined.
        lengths: int64 [B]: the number of each request's keys. The last key has just been written.
        page_size: Tokens in a page.
    """
    count = len(table)
    whole = (lengths - 1) // page_size
    begins = table[whole > 0, 0]
    if len(np.unique(begins)) == len(begins):
        return None
    runs: list[IntArray] = []
    # For each place in ``order``, its group. The members of a group stand side by side and share their first ``at`` pages;
    # runs exist for the first ``done`` of these.
    order = np.arange(count)
    group, at, done = np.zeros((3, count), np.int64)
    for _ in range(_LEVELS):
        column = np.minimum(at, table.shape[1] - 1)
        page = np.where(whole[order] > at, table[order, column].astype(np.int64), -1 - order)
        sort = np.lexsort((page, group))
        order, group, at, done, page = order[sort], group[sort], at[sort], done[sort], page[sort]
        first = np.flatnonzero(np.append(True, (np.diff(group) != 0) | (np.diff(page) != 0)))
        sizes = np.diff(first, append=count)
        group = np.repeat(np.arange(len(first)), sizes)
        wide = np.flatnonzero(sizes > 1)
        if not len(wide):
            break
        end = _common(table, order, first[wide], sizes[wide], whole)
        begin = done[first[wide]]
        long = (end - begin) * page_size >= _LEAST_RUN
        found = np.stack((first[wide], sizes[wide], begin * page_size, end * page_size), 1)
        runs.append(found[long])
        ends, covered = at[first], done[first]
        ends[wide], covered[wide] = end, np.where(long, end, begin)
        at, done = ends[group], covered[group]
    every = np.concatenate(runs) if runs else np.zeros((0, 4), np.int64)
    return SharedRuns(order, *every.T) if len(every) else None


def _common(
    table: npt.NDArray[np.int32], order: IntArray, first: IntArray, sizes: IntArray, whole: IntArray
) -> IntArray:
    """How many full pages the members of each group share."""
    places = np.repeat(first - np.cumsum(sizes) + sizes, sizes) + np.arange(sizes.sum())
    members, ones = order[places], np.repeat(order[first], sizes)
    begins = np.cumsum(sizes) - sizes
    limit = np.minimum.reduceat(whole[members], begins)
    columns = int(limit.max())
    other = table[members, :columns] != table[ones, :columns]
    same = np.where(other.any(1), other.argmax(1), columns)
    return np.minimum(np.minimum.reduceat(same, begins), limit)


KernelT = TypeVar("KernelT", bound=PlannedAttention)


class KernelAttention(Generic[KernelT]):
    """Implements ``StepAttention`` with a planned kernel for each kind of layer.

    Args:
        pool: Keys and values.
        kernels: The kernel of each kind.

    Attributes:
        advances: Whether :meth:`advance` may be called.
    """

    def __init__(self, pool: DevicePool, kernels: Mapping[Variant, KernelT]) -> None:
        self._pool = pool
        self._kernels = kernels
        # Testing whether an object implements a protocol takes longer than launching a kernel, so it is tested once.
        each_kernel: list[PlannedAttention] = list(kernels.values())
        self._advancing = [each for each in each_kernel if isinstance(each, AdvancingAttention)]
        self.advances = len(self._advancing) == len(kernels)
        # Each layer's are looked up once: between the layers of a prompt the device waits for the host.
        self._found: dict[int, tuple[KernelT, StoredPages]] = {}

    def plan(self, batch: AttentionBatch) -> None:
        assert batch.keys is not None
        query_indptr = torch.from_numpy(batch.query_starts.astype(np.int32))
        for kernel in self._kernels.values():
            kernel.plan(query_indptr, batch.keys)

    def advance(self, by: int | Tensor) -> None:
        """Adds ``by`` keys to each planned request (fewer, if negative); the plan's pages must hold them.

        Args:
            by: How many; int64 [B] on the device: how many each.
        """
        for kernel in self._advancing:
            kernel.advance(by)

    def attend(self, layer: AttentionLayer, query: Tensor, out: Tensor | None = None) -> Tensor:
        kernel, cache = self._of(layer)
        return kernel.run(query.contiguous(), cache, out)

    def _of(self, layer: AttentionLayer) -> tuple[KernelT, StoredPages]:
        found = self._found.get(layer.index)
        if found is None:
            pool, index = self._pool, layer.index
            values = pool.value_pages(index)
            if layer.latent is not None:
                values = values[..., : layer.latent.rank]
            cache = StoredPages(pool.key_pages(index), values, pool.scales.of(index), layer.sinks)
            found = self._found[index] = self._kernels[layer.kind], cache
        return found


class LatentKernelAttention(KernelAttention[PlannedLatentAttention]):
    """Implements ``StepAttention`` for decodes of latent layers, and ``AbsorbedAttention``."""

    def attend(self, layer: AttentionLayer, query: Tensor, out: Tensor | None = None) -> Tensor:
        assert layer.latent is not None
        result = self.attend_absorbed(layer, layer.latent.absorb(query))
        return result.flatten(1) if out is None else out.copy_(result)

    def attend_absorbed(self, layer: AttentionLayer, query: Tensor) -> Tensor:
        assert layer.latent is not None
        kernel, cache = self._of(layer)
        return kernel.values(query, cache, layer.latent)


class GroupedAttention:
    """Implements ``StepAttention`` for layers whose pages stand in several page tables: each table's attention is planned
    separately.

    Args:
        pool: Keys and values.
        groups: The attention of each group's layers.

    Attributes:
        parts: The attention of each group that has layers.
    """

    def __init__(self, pool: DevicePool, groups: Sequence[StepAttention]) -> None:
        self._pool = pool
        self._groups = groups
        self._used = frozenset(
            pool.group.values()
        )  # the other groups belong to layers of another pipeline stage, or to no layer
        self.parts = [groups[group] for group in sorted(self._used)]

    def plan(self, batch: AttentionBatch) -> None:
        for group, (attention, each) in enumerate(zip(self._groups, batch.tables, strict=True)):
            if group in self._used:
                attention.plan(each)

    def attend(self, layer: AttentionLayer, query: Tensor, out: Tensor | None = None) -> Tensor:
        return self._groups[self._pool.group[layer.index]].attend(layer, query, out)


class PagedPlan:
    """Implements ``AttentionPlan``.

    Args:
        pool: Keys and values.
        decode: Attention of the first requests, planned.
        prefill: Attention of the others, planned.
        decodes: How many tokens belong to the first requests, one for each; None: all.
        cache_slots: int64 [T] on the device, for each group of the pool.
        states: The attribute.

    Attributes:
        states: The step's way through the states of layers that keep one; None: no layer does.
        whole: The attention of all tokens, if all belong to the first requests.
        absorbed: The same, if it takes absorbed queries.
    """

    def __init__(
        self,
        pool: DevicePool,
        decode: StepAttention,
        prefill: StepAttention,
        decodes: int | None,
        cache_slots: Sequence[Tensor],
        states: StatePlan | None = None,
    ) -> None:
        self._pool, self.states = pool, states
        self._decode, self._prefill = decode, prefill
        self._decodes = decodes
        self.whole = decode if decodes is None else None
        self.absorbed = self.whole if isinstance(self.whole, LatentKernelAttention) else None
        self._cache_slots = cache_slots

    def destination(self, layer: AttentionLayer) -> KVDestination:
        self._pool.await_layer(layer.index)
        return self._pool.destination(layer.index, self._cache_slots[self._pool.group[layer.index]])

    def attend_cached(self, layer: AttentionLayer, query: Tensor) -> Tensor:
        return self._attend(layer, query, None).view(len(query), -1)

    def attend_into(self, layer: AttentionLayer, query: Tensor, out: Tensor) -> None:
        """Waits until the layer's cached pages have arrived, then attends and fills ``out`` [T, H, D]."""
        self._pool.await_layer(layer.index)
        self._attend(layer, query, out)

    def _attend(self, layer: AttentionLayer, query: Tensor, out: Tensor | None) -> Tensor:
        count = self._decodes
        if count is None:
            return self._decode.attend(layer, query, out)
        if count == 0:
            return self._prefill.attend(layer, query, out)
        out = layer.empty_result(query) if out is None else out
        self._decode.attend(layer, query[:count], out[:count])
        self._prefill.attend(layer, query[count:], out[count:])
        return out


class PagedAttention:
    """Plans the attention of steps.

    Args:
        needs: What the model asks.
        pool: Keys and values.
        ops: The device's operations.
        prefill: The backend of prompts; one that has ``prefill``.
        decode: The backend of decodes; one that has ``decode``. The same as ``prefill`` without ``reads_keys`` computes whole
            steps as one.
        kinds: The kinds of each group's layers; None: the cache has one group.
        share: Whether keys that decodes share are read once for all of them, if the backend can do this and it pays.

    Attributes:
        shape: What all layers share.
        plans_from: As ``AttentionBackend`` has it.
    """

    def __init__(
        self,
        needs: AttentionNeeds,
        pool: DevicePool,
        ops: DeviceOps,
        prefill: AttentionBackend,
        decode: AttentionBackend,
        kinds: Sequence[tuple[Variant, ...]] | None = None,
        *,
        share: bool = False,
    ) -> None:
        assert prefill.prefill is not None and decode.decode is not None
        self.shape = needs.shape
        self._pool = pool
        self._ops = ops
        self._reads_keys = prefill.reads_keys or decode.reads_keys
        # Requests may share pages, so a step can name more pages than the pool has.
        count = 4 * pool.num_pages if self._reads_keys else 0
        shared: dict[str, Any] = {}
        self._parts = [
            AttentionParts(
                replace(needs, kinds=each), pool, ops, torch.zeros(count, dtype=torch.int32, device=ops.device), shared
            )
            for each in kinds or (needs.kinds,)
        ]
        self._prefill = self._joined([prefill.prefill(parts) for parts in self._parts])
        whole = prefill is decode and not self._reads_keys
        self._decode = self._prefill if whole else self._joined([decode.decode(parts) for parts in self._parts])
        self._make_graphs = decode.graphs
        self._prefixes = SharedPrefixes(pool.page_size)
        makes = [decode.shared(parts) for parts in self._parts] if share and decode.shared is not None else []
        self._make_shared = [make for make in makes if make is not None]
        self._shared = self._joined([make(None) for make in self._make_shared]) if self._make_shared else None
        self._tile = prefill.prompt_tile(needs)
        make_prompts = prefill.shared_prompts if share and not needs.latent else None
        self._shared_prompts = None if make_prompts is None else self._joined([make_prompts(p) for p in self._parts])
        self._orders = share and needs.latent and prefill.orders_prompts
        planned = [prefill.plans_from(parts) for parts in self._parts]
        self.plans_from = min((each for each in planned if each is not None), default=None)
        self._planned = ops.fence()

    @property
    def shares_prompts(self) -> bool:
        """Whether chunks of prompts read shared keys once, if it pays."""
        return self._shared_prompts is not None

    @property
    def most_pages(self) -> int:
        """The most pages that the requests of a step may name together."""
        return len(self._parts[0].indices)

    def graphs(self) -> Callable[[int], StepAttention] | None:
        """Makes the attention for a number of decodes at fixed addresses, for CUDA graphs; None: it cannot be captured."""
        if self._make_graphs is None:
            return None
        makes = [self._make_graphs(parts) for parts in self._parts]
        return lambda batch: self._joined([make(batch) for make in makes])

    def shared_graphs(self) -> Callable[[int], StepAttention] | None:
        """Makes the attention of decodes that share keys, for CUDA graphs too; None: it cannot be captured."""
        if self._make_graphs is None or self._shared is None:
            return None
        return lambda batch: self._joined([make(batch) for make in self._make_shared])

    def find_shared(self, tables: Sequence[npt.NDArray[np.int32]], lengths: npt.NDArray[np.int64]) -> Runs | None:
        """The pages that decodes share in each page table, if reading them once is possible and pays."""
        return None if self._shared is None or len(lengths) < 2 else self._prefixes.find(tables, lengths)

    def take_spared(self) -> int:
        """How many keys each layer has not read again since the last call, because another request of the step shares them."""
        return self._prefixes.take()

    def _joined(self, groups: list[StepAttention]) -> StepAttention:
        return groups[0] if len(groups) == 1 else GroupedAttention(self._pool, groups)

    def begin_plan(self) -> None:
        """Waits until the device has read the last plan's host buffers, which the next plan overwrites. It reads them before the
        step's computation, so a step may be planned while the device computes the one before."""
        self._planned.wait()

    def end_plan(self) -> None:
        """Notes that all copies of a plan have been queued on the device."""
        self._planned.set()

    def with_keys(self, batch: AttentionBatch) -> AttentionBatch:
        """The batch with its pages on the device, if something reads them. Vectorised, O(pages)."""
        if not self._reads_keys:
            return batch
        tables = [self._with_keys(each, parts.indices) for each, parts in zip(batch.tables, self._parts, strict=True)]
        return in_tables(tables)

    def _with_keys(self, batch: AttentionBatch, buffer: Tensor) -> AttentionBatch:
        page_size = self._pool.page_size
        counts = -(-batch.seq_lens // page_size)
        indptr = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(counts, out=indptr[1:])
        pages = batch.page_table[np.arange(batch.page_table.shape[1])[None] < counts[:, None]]
        indices = buffer[: len(pages)]
        self._ops.fill(indices, pages)
        last = (batch.seq_lens - (counts - 1) * page_size).astype(np.int32)
        return replace(batch, keys=PagedKeys(torch.from_numpy(indptr), indices, torch.from_numpy(last), batch.runs))

    def plan(self, batch: AttentionBatch) -> PagedPlan:
        """Prepares a step. Does not mutate the batch; the plan is valid until the next call."""
        self.begin_plan()
        longer = np.flatnonzero(np.diff(batch.query_starts) > 1)
        decodes = int(longer[0]) if len(longer) else len(batch.seq_lens)
        decode, prefill = self._decode, self._prefill
        runs = self.find_shared([each.page_table[:decodes] for each in batch.tables], batch.seq_lens[:decodes])
        if runs is not None:
            assert self._shared is not None
            decode = self._shared
            batch = in_tables([replace(each, runs=own) for each, own in zip(batch.tables, runs, strict=True)])
        elif decode is self._prefill:
            decodes = 0
        batch = self.with_keys(batch)
        every = decodes == len(batch.seq_lens)
        if every:
            decode.plan(batch)
        else:
            rest = batch
            if decodes:
                first, rest = batch.split(decodes)
                decode.plan(first)
            common = self._find_prompts(rest)
            if common is not None:
                assert self._shared_prompts is not None
                prefill = self._shared_prompts
                rest = in_tables([_with_runs(each, own) for each, own in zip(rest.tables, common, strict=True)])
            elif self._orders and len(rest.seq_lens) > 1:
                rest = replace(rest, prompts=self._prefixes.order(rest.page_table, rest.seq_lens))
            prefill.plan(rest)
        self.end_plan()
        slots = [each.cache_slots for each in batch.tables]
        return PagedPlan(self._pool, decode, prefill, None if every else decodes, slots, batch.states)

    def _find_prompts(self, batch: AttentionBatch) -> Runs | None:
        """The pages that chunks of prompts share, if reading them once is possible and pays."""
        if self._shared_prompts is None or len(batch.seq_lens) < 2 or batch.reach is not None:
            return None
        tokens = np.diff(batch.query_starts)
        tables = [each.page_table for each in batch.tables]
        return self._prefixes.find_prompts(tables, batch.seq_lens - tokens, tokens, self._tile)


def _with_runs(batch: AttentionBatch, runs: SharedRuns | None) -> AttentionBatch:
    return replace(batch, runs=runs, keys=None if batch.keys is None else replace(batch.keys, runs=runs))
