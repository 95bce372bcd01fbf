"""The KV cache's second tier, in the host's memory, which the ranks of a host share."""

from __future__ import annotations

from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.model.pools.host_pool import HostPool, host_pool_pages, pool_bytes
from sapwood_worker.model.pools.page_order import PageOrder, RankPart
from sapwood_worker.model.pools.pool_over_hosts import DistantPages, PoolOverHosts, join_hosts
from sapwood_worker.model.pools.shared_memory import SharedMemory
from sapwood_worker.model.runner.options import RunnerOptions
from sapwood_worker.records.kv_layout import KVLayout


def build_host_pool(
    options: RunnerOptions, layout: KVLayout, whole: KVLayout, num_pages: int, parallel: Parallel
) -> HostPool | None:
    """The second tier; None: the options want none. Each rank has its part of every record.

    Where the ranks of a stage keep the same, there is one part, to which all write the same bytes. Ranks with requests of their
    own have a tier each, all equally large; the first, which decides for all, has the others' too. What it needs of
    other hosts it gets over a connection.

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
        return _pools_of_ranks(min(parallel.exchange(own, int)), layout, options, parallel)
    rank, each = parallel.pp.rank * parallel.tp.size + parallel.tp.rank, parallel.tp.size * parallel.pp.size
    each //= options.nodes
    first = rank // each * each
    own = layout.page_bytes
    # A rank that keeps the same as the one before it on this host has no part of its own.
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
    """Memory of so many bytes that the ranks of a host share. ``first`` makes it; the other ranks give a size of 0."""
    memory = SharedMemory.create(size) if size else None
    path = parallel.exchange("" if memory is None else memory.path, str)[first]
    memory = memory or SharedMemory.open(path)
    parallel.exchange("", str)  # all have opened it
    return memory


def _pools_of_ranks(pages: int, layout: KVLayout, options: RunnerOptions, parallel: Parallel) -> HostPool:
    """This rank's pool of pages of its own requests; on the first with the others'."""
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
