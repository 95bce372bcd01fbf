"""The KV cache's second tier, in the host's memory, which the ranks of a host share."""

from __future__ import annotations

from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.model.pools.host_pool import HostPool, host_pool_pages, pool_bytes
from sapwood_worker.model.pools.page_order import PageOrder, RankPart
from sapwood_worker.model.pools.shared_memory import SharedMemory
from sapwood_worker.model.runner.options import RunnerOptions
from sapwood_worker.records.kv_layout import KVLayout


def build_host_pool(
    options: RunnerOptions, layout: KVLayout, whole: KVLayout, num_pages: int, parallel: Parallel
) -> HostPool | None:
    """The second tier; None: the options want none. Each rank has its part of every record.

    Where the ranks of a stage keep the same, there is one part, to which all write the same bytes. Ranks with requests of their
    own have a tier each, all equally large; the first, which decides for all, has the others' too where all are on one host.

    Args:
        options: Say how large it is.
        layout: What this rank keeps of a page.
        whole: What one rank would keep that has everything.
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
        return _pools_of_ranks(min(parallel.exchange(own)), layout.page_bytes, parallel, one_host=options.nodes == 1)
    rank, each = parallel.pp.rank * parallel.tp.size + parallel.tp.rank, parallel.tp.size * parallel.pp.size
    each //= options.nodes
    first = rank // each * each
    own = layout.page_bytes
    # A rank that keeps the same as the one before it on this host has no part of its own.
    shares = layout.replicated and parallel.tp.rank > 0 and rank > first
    layouts = parallel.exchange(None if shares else layout)
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
    pages = parallel.exchange(pages)[0]
    order = None
    if options.nodes == 1:
        ranks = parallel.tp.size
        own_parts = [
            RankPart(sum(parts[:number]), other, number % ranks, ranks)
            for number, other in enumerate(layouts)
            if other is not None
        ]
        order = PageOrder(whole, own_parts)
    memory = SharedMemory.create(pool_bytes(pages, size, order)) if leads else None
    path = parallel.exchange("" if memory is None else memory.path)[first]
    memory = memory or SharedMemory.open(path)
    parallel.exchange("")  # all have opened it
    return HostPool(pages, size, memory, slice(start, start + own), order)


def _pools_of_ranks(pages: int, page_bytes: int, parallel: Parallel, *, one_host: bool) -> HostPool:
    """This rank's pool of pages of its own requests; on the first with the others'."""
    own = SharedMemory.create(pool_bytes(pages, page_bytes)) if one_host else None
    paths = parallel.exchange(None if own is None else own.path)
    others = [None if path is None else SharedMemory.open(path) for path in paths[1:]] if parallel.tp.rank == 0 else []
    parallel.exchange("")  # all are open
    return HostPool(pages, page_bytes, own, others=[HostPool(pages, page_bytes, each) for each in others])
