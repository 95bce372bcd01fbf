"""How much memory a runner's pools get, on the device and on the host, and the step that measures it."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sapwood_common.errors import ConfigError
from sapwood_kernels.attention.cudnn_lengths import lengths
from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.attention.paged import LEAST_SPARED, PagedAttention
from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.model.families.decoder import DecoderModel
from sapwood_worker.model.pools.device_pool import DevicePool, KVScales
from sapwood_worker.model.pools.host_pool import (
    HostPool,
    PageOrder,
    RankPart,
    SharedMemory,
    available_memory,
    host_pool_pages,
    pool_bytes,
)
from sapwood_worker.model.pools.pool_over_hosts import DistantPages, PoolOverHosts, join_hosts
from sapwood_worker.model.pools.state_pool import StatePool
from sapwood_worker.model.runner.forward_batch import ForwardBatch, build_forward_batch
from sapwood_worker.model.runner.options import RunnerOptions
from sapwood_worker.model.sizes import Sizes
from sapwood_worker.records.kv_layout import KVLayout, WindowGroup
from sapwood_worker.records.step import Step

logger = logging.getLogger(__name__)


# How much of a GPU's memory is left for the KV cache: measured by a trial of the largest step, not guessed.
def measure_pool_bytes(device: torch.device, fraction: float, trial: Callable[[], int]) -> int:
    """Bytes for the cache, so that with the weights and the largest step ``fraction`` of the device's memory is used.

    Args:
        device: A CUDA device, with the weights on it.
        fraction: In (0, 1]; memory that other programs use counts as used.
        trial: Computes the largest step with all of a runner's buffers and a small cache; returns that cache's bytes.

    Raises:
        ConfigError: No memory is left.
    """
    _release(device)
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    cache = trial()
    torch.cuda.synchronize(device)
    step = torch.cuda.max_memory_reserved(device) - before - cache
    _release(device)
    free, total = torch.cuda.mem_get_info(device)
    used = total - free
    left = int(total * fraction) - used - step
    logger.info(
        "memory: %.1f of %.1f GiB used, %.1f for the largest step, %.1f for the KV cache",
        used / _GIB, total / _GIB, step / _GIB, left / _GIB,
    )  # fmt: skip
    if left <= 0:
        raise ConfigError(
            f"--memory-fraction {fraction}: of {total / _GIB:.1f} GiB {used / _GIB:.1f} are used and a step needs "
            f"{step / _GIB:.1f} more: nothing is left for the KV cache"
        )
    return left


def _release(device: torch.device) -> None:
    torch.cuda.synchronize(device)
    gc.collect()
    torch.cuda.empty_cache()


SCRATCH_PAGES = 1
"""Additional pages of a pool that the scheduler does not know: padding rows write there."""


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """How much a pool holds.

    Attributes:
        pages: Pages of each group of the layout.
        snapshots: Slots for snapshots of states.
    """

    pages: tuple[int, ...]
    snapshots: int


class PoolBuilder:
    """Makes the pools of one model.

    Args:
        options: The runner's.
        layout: What a page holds on this rank.
        sizes: What runs at once.
        device: Where the pages are.
        scales: The scales of keys and values in float8; None: they are not in float8.
        parallel: The ranks. Each gets as many pages as the rank with the least room.
    """

    def __init__(
        self,
        options: RunnerOptions,
        layout: KVLayout,
        sizes: Sizes,
        device: torch.device,
        scales: KVScales | None,
        parallel: Parallel,
    ) -> None:
        self._options = options
        self._layout = layout
        self._sizes = sizes
        self._device = device
        self._scales = scales
        self._parallel = parallel

    def build(self, counts: Sequence[int], snapshots: int = 0) -> DevicePool:
        """A pool with this many pages in each group of the layout, besides the scratch pages, and slots for states.

        Args:
            counts: The pages.
            snapshots: Slots for snapshots of states, besides one for each request that may run.

        Raises:
            ConfigError: The pages are too few, or there is no memory for them.
        """
        running = self._sizes.max_running
        if counts[0] < running:
            raise ConfigError(
                f"the KV cache holds {counts[0]} pages of {self._options.page_size} tokens, fewer than the "
                f"{running} requests that may run: give it more memory or lower --max-running"
            )
        every = [count + SCRATCH_PAGES for count in counts]
        return build_device_pool(self._layout, every, self._device, self._scales, (running, snapshots))

    def trial(self, longest: int) -> tuple[list[int], DevicePool]:
        """The lengths of prompts, each at most ``longest``, that fill a step with the most tokens, and a pool that holds them."""
        running, step_tokens = self._sizes.max_running, self._sizes.max_step_tokens
        prompts = [min(longest, step_tokens)]
        while sum(prompts) < step_tokens and len(prompts) < running:
            prompts.append(min(longest, step_tokens - sum(prompts)))
        needed = sum(-(-length // self._options.page_size) for length in prompts)
        return prompts, self.build([max(needed, running)] * len(self._layout.groups))

    def page_counts(self, num_pages: int | None, beside: int, try_step: Callable[[], int]) -> PoolCounts:
        """The pages of each group of the layout and the snapshots of states, for good.

        Args:
            num_pages: Pages of the first group; None: as many as the memory holds.
            beside: Bytes that another model keeps of each page, out of the same memory.
            try_step: Computes the largest step with all of a runner's buffers and a trial pool; returns that pool's bytes.

        Raises:
            ConfigError: There is no memory for them.
        """
        sizes, memory = self._sizes, self._sizes.cache_bytes
        if num_pages is None and memory is None:
            memory = measure_pool_bytes(self._device, self._options.memory_fraction, try_step)
        own_bytes = self._layout.page_bytes
        share = own_bytes / max(1, own_bytes + beside)
        snapshots, memory = plan_snapshots(self._layout, num_pages, memory or 0, sizes.max_running)
        own = plan_pages(
            self._layout,
            num_pages,
            int(memory * share),
            sizes.max_running,
            sizes.max_step_tokens,
            alone=not beside,
        )
        found = self._parallel.exchange((*own, snapshots), tuple[int, ...])
        *pages, snapshots = map(min, zip(*found, strict=True))
        return PoolCounts(tuple(pages), snapshots)


_GIB = 1 << 30


def build_device_pool(
    layout: KVLayout,
    counts: Sequence[int],
    device: torch.device,
    scales: KVScales | None,
    states: tuple[int, int] = (0, 0),
) -> DevicePool:
    """The pages, and the states if layers keep some.

    Args:
        layout: What a page holds.
        counts: Pages of each group of the layout, the scratch page included.
        device: Where they lie.
        scales: The factors of a float8 pool.
        states: Slots for states: of requests, and of snapshots.

    Raises:
        ConfigError: The device does not have that much memory free. A CPU would have it until the pages are written, and its
            kernel would then end some process.
    """
    wanted = sum(count * layout.group_bytes(group) for group, count in enumerate(counts))
    wanted += sum(states) * layout.state_bytes
    if device.type == "cpu" and wanted > (free := available_memory() or wanted):
        raise _too_large(wanted, f"the {free / _GIB:.1f} GiB of memory that are free")
    try:
        kept = [StatePool(each.layers, *states, each.heads * each.dim, device) for each in layout.states]
        return DevicePool(layout, counts, device, scales, kept[0] if kept else None)
    except torch.OutOfMemoryError:
        raise _too_large(wanted, f"what is free of {device}") from None


def _too_large(wanted: int, room: str) -> ConfigError:
    return ConfigError(
        f"the KV cache of {wanted / _GIB:.1f} GiB does not fit in {room}: give --kv-cache-gb or --num-pages less"
    )


# How many snapshots of states there is room for.


_SNAPSHOTS = 8
"""The most snapshots for each request that may run."""


def plan_snapshots(layout: KVLayout, num_pages: int | None, memory: int, max_running: int) -> tuple[int, int]:
    """The number of snapshots of states, and the bytes that they and the requests' own states leave for pages.

    Snapshots get at most as much memory as pages get, and no more slots than are likely to be found again.

    Args:
        layout: The layout.
        num_pages: Pages of the first group; None: as many as the memory holds.
        memory: Bytes for pages and states, unless ``num_pages`` is given.
        max_running: Most requests that run at once.

    Raises:
        ConfigError: The states of running requests alone need more memory.
    """
    each, most = layout.state_bytes, _SNAPSHOTS * max_running
    if not each:
        return 0, memory
    if num_pages is not None:
        return min(most, max(max_running, num_pages * layout.page_bytes // each)), memory
    left = memory - max_running * each
    if left <= 0:
        raise ConfigError(
            f"the states of {max_running} requests take {max_running * each / _GIB:.1f} GiB of {memory / _GIB:.1f} for the KV "
            "cache: give it more memory or lower --max-running"
        )
    snapshots = min(most, left // 2 // each)
    return snapshots, left - snapshots * each


# How the KV cache's memory is divided between layers that keep all tokens and layers that keep a window of them.
_TOKENS = 1 << 20
"""Tokens that pages stand for where no layer keeps anything in them."""
_LONG = 16
"""If memory is too small for the windows of all requests, it is divided as for requests with this many times a window's pages."""


def plan_pages(
    layout: KVLayout,
    num_pages: int | None,
    memory: int,
    max_running: int,
    max_step_tokens: int,
    *,
    alone: bool = True,
) -> tuple[int, ...]:
    """The pages of each group of the layout.

    The windows get pages for all requests that may run and for the prompts of two steps, if the first group then still has at
    least ``_LONG`` times as many; never more than the first group. If no layer uses the first group's pages, the windows get all
    the memory, and the first group has ``_LONG`` times as many pages.

    Args:
        layout: The layout.
        num_pages: Pages of the first group; None: as many as the memory holds.
        memory: Bytes for all of them, unless ``num_pages`` is given.
        max_running: Most requests that run at once.
        max_step_tokens: Most tokens of a step.
        alone: Whether no other model keeps something for each page of the first group.

    Raises:
        ConfigError: A window's pages would be too few for a single request.
    """
    groups = range(1, len(layout.groups))
    bytes_of = [layout.group_bytes(group) for group in (0, *groups)]
    if num_pages is None and not any(bytes_of) and layout.states:  # pages only say which tokens there were
        num_pages = _TOKENS // layout.page_size
    computed = 2 * -(-max_step_tokens // layout.page_size)
    wanted = [max_running * WindowGroup(layout.reach(group), 0).least(layout.page_size) + computed for group in groups]
    if num_pages is None and not bytes_of[0]:  # all layers have windows, perhaps those of a pipeline's stage only
        even = memory // layout.page_bytes
        num_pages, windows = even * (_LONG if alone else 1), [even] * len(wanted)
    elif num_pages is None:
        even = memory // layout.page_bytes
        # As many as fit if the first group is _LONG times as large.
        most = memory // (sum(bytes_of[1:]) + _LONG * bytes_of[0]) if wanted else 0
        windows = [
            min(even, each, max(most, _least(layout, group))) for group, each in zip(groups, wanted, strict=True)
        ]
        left = memory - sum(count * size for count, size in zip(windows, bytes_of[1:], strict=True))
        num_pages = left // bytes_of[0]
    else:
        windows = [min(num_pages, each) for each in wanted]
    for group, count in zip(groups, windows, strict=True):
        if count < min(_least(layout, group), num_pages):
            raise ConfigError(
                f"the KV cache holds {count} pages of {layout.page_size} tokens for layers that see {layout.groups[group]} "
                f"tokens, fewer than the {_least(layout, group)} that a request needs: give it more memory"
            )
    return (num_pages, *windows)


def _least(layout: KVLayout, group: int) -> int:
    return WindowGroup(layout.reach(group), 0).least(layout.page_size)


# The KV cache's second tier, in the host's memory, which the ranks of a host share.


def build_host_pool(
    options: RunnerOptions, layout: KVLayout, whole: KVLayout, num_pages: int, parallel: Parallel
) -> HostPool | None:
    """The second tier; None: the options want none. Each rank has its part of every record.

    If the ranks of a stage keep the same content, there is one part, to which all write the same bytes. With data-parallel
    attention each rank has a tier, all equally large; the first rank decides for all and can also reach the others' tiers, over a
    connection if they are on other hosts.

    Args:
        options: Say how large it is.
        layout: What this rank keeps of a page.
        whole: What a single rank with the whole model would keep.
        num_pages: Pages on the device.
        parallel: The groups of ranks.
    """
    if not options.host_cache_gb and not options.host_cache_ratio:
        return None
    if parallel.rows is not None:  # each rank has pages of its own requests
        own = host_pool_pages(
            page_bytes=parallel.tp.size // options.nodes * layout.page_bytes,
            num_device_pages=num_pages,
            gigabytes=options.host_cache_gb,
            ratio=options.host_cache_ratio,
        )
        return _pools_of_ranks(min(parallel.exchange(own, int)), layout, options, parallel)
    rank, each = parallel.pp.rank * parallel.tp.size + parallel.tp.rank, parallel.tp.size * parallel.pp.size
    each //= options.nodes
    first = rank // each * each
    own = layout.page_bytes
    # A rank that keeps the same content as the one before it on this host has no part of its own.
    shares = layout.replicated and parallel.tp.rank > 0 and rank > first
    layouts = parallel.exchange(None if shares else layout, KVLayout | None)
    parts = [0 if other is None else other.page_bytes for other in layouts]
    start = sum(parts[first:rank]) - (own if shares else 0)
    size = sum(parts[first : first + each])
    leads = rank == first
    pages = 0
    if rank == 0:
        pages = host_pool_pages(
            page_bytes=size,
            num_device_pages=num_pages,
            gigabytes=options.host_cache_gb,
            ratio=options.host_cache_ratio,
        )
    if parallel.tp.size == parallel.pp.size == 1:
        shared = SharedMemory.create(pool_bytes(pages, size)) if options.share_host_cache else None
        return HostPool(pages, size, shared)
    pages = parallel.exchange(pages, int)[0]
    ranks = parallel.tp.size
    every_part = [
        RankPart(sum(parts[:number]), other, number % ranks, ranks)
        for number, other in enumerate(layouts)
        if other is not None
    ]
    order = PageOrder(whole, every_part) if options.nodes == 1 or rank == 0 else None
    mine = slice(start, start + own)
    if options.nodes == 1:
        memory = _shared(parallel, pool_bytes(pages, size, order) if leads else 0, first)
        return HostPool(pages, size, memory, mine, order)
    memory = _shared(parallel, pool_bytes(pages, size) if leads else 0, first)
    serving = range(each, ranks * parallel.pp.size, each)
    plain = HostPool(pages, size, memory, mine)
    ways = join_hosts(rank, parallel.exchange, plain if rank in serving else None, serving, options.meeting_host)
    if order is None:
        return plain
    ends = [sum(parts[:number]) for number in (*serving, len(parts))]
    distant = [DistantPages(way, slice(*ends[at : at + 2])) for at, way in enumerate(ways)]
    return PoolOverHosts(pages, size, memory, mine, order, distant, sum(parts))


def _shared(parallel: Parallel, size: int, first: int) -> SharedMemory:
    """Memory of this many bytes that the ranks of a host share. ``first`` makes it; the other ranks give a size of 0."""
    memory = SharedMemory.create(size) if size else None
    path = parallel.exchange("" if memory is None else memory.path, str)[first]
    memory = memory or SharedMemory.open(path)
    parallel.exchange("", str)  # all have opened it
    return memory


def _pools_of_ranks(pages: int, layout: KVLayout, options: RunnerOptions, parallel: Parallel) -> HostPool:
    """This rank's pool for pages of its own requests; on the first rank also the other ranks' pools."""
    size, rank, each = layout.page_bytes, parallel.tp.rank, parallel.tp.size // options.nodes
    own = SharedMemory.create(pool_bytes(pages, size))
    paths = parallel.exchange(own.path, str)
    opened = [SharedMemory.open(path) for path in paths[1:each]] if rank == 0 else []
    parallel.exchange("", str)  # all are open
    others = [HostPool(pages, size, each) for each in opened]
    if options.nodes > 1:
        serving = range(each, parallel.tp.size)
        plain = HostPool(pages, size, own) if rank in serving else None
        ways = join_hosts(rank, parallel.exchange, plain, serving, options.meeting_host)
        if plain is not None:
            return plain
        order = PageOrder(layout, [RankPart(0, layout, 0, 1)])
        for way in ways:
            distant = [DistantPages(way, slice(0, size))]
            others.append(PoolOverHosts(pages, 0, None, None, order, distant, size))
    return HostPool(pages, size, own, others=others)


# A step of dummy prompts, to measure its memory.


@torch.inference_mode()
def compute_trial(
    prompts: Sequence[int],
    model: DecoderModel,
    pool: DevicePool,
    backend: PagedAttention,
    ops: DeviceOps,
    common: int = 0,
) -> Tensor:
    """The hidden states of prompts with these numbers of tokens, in the pool's first pages.

    Args:
        prompts: Tokens of each.
        model: Computes them.
        pool: Whose pages are written.
        backend: The model's attention.
        ops: The device's operations.
        common: How many of the pool's first pages precede all prompts as a common prefix.
    """
    batch = _batch(prompts, pool, ops, common)
    hidden: Tensor = model(batch.token_ids, batch.positions, backend.plan(batch.attention))
    return hidden


def _batch(prompts: Sequence[int], pool: DevicePool, ops: DeviceOps, common: int = 0) -> ForwardBatch:
    counts = np.array(prompts, np.int64)
    needed = -(-counts // pool.page_size)
    table = np.zeros((len(counts), needed.max()), np.int32)
    table[np.arange(needed.max()) < needed[:, None]] = np.arange(needed.sum()) + common
    table = np.concatenate((np.tile(np.arange(common, dtype=np.int32), (len(counts), 1)), table), 1)
    slots, zeros = np.arange(len(counts)), np.zeros_like(counts)
    tokens = np.zeros(counts.sum(), np.int64)
    starts = zeros + common * pool.page_size
    step = Step(0, slots, starts=starts, counts=counts, samples=zeros + 1, token_ids=tokens)
    step.pages = np.tile(table, (1, len(pool.counts)))
    return build_forward_batch(step, pool.page_size, ops, tables=len(pool.counts), states=pool.states)


def compute_shared_trial(
    longest: int, model: DecoderModel, pool: DevicePool, backend: PagedAttention, ops: DeviceOps
) -> None:
    """Computes short prompts with a common prefix that is long enough to be read once, if that fits in the pool and in
    ``longest`` tokens. So the kernels for such requests are compiled before the first of them comes.
    """
    pages = -(-LEAST_SPARED // pool.page_size)
    if backend.shares_prompts and pages + 2 < min(pool.counts) and (pages + 1) * pool.page_size <= longest:
        compute_trial([2, 2], model, pool, backend, ops, common=pages)
        backend.take_spared()


@torch.inference_mode()
def plan_prompts(
    most: int, model: DecoderModel, pool: DevicePool, backend: PagedAttention, ops: DeviceOps
) -> list[int]:
    """Computes one layer on a prompt of each length, up to ``most`` tokens, whose attention is planned once.

    Call it from the thread that runs the steps, because only that thread finds the plans. Returns the lengths; O(lengths)
    launches of a layer.
    """
    windows, least = model.config.windows, backend.plans_from
    whole = [place for place, index in enumerate(model.own) if windows[index] is None and model.config.attends(index)]
    if least is None or not whole:
        return []
    planned = [min(length, most) for length in lengths(least, most)]
    for count in planned:
        batch = _batch([count], pool, ops)
        hidden = torch.zeros(count, model.config.hidden_size, dtype=backend.shape.dtype, device=ops.device)
        model.run_layer(whole[0], hidden, backend.plan(batch.attention))
    return planned
