"""Measures a scheduler's load. O(running)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import NamedTuple

import msgspec

from sapwood_worker.core.cache.hierarchical import HierarchicalCache
from sapwood_worker.core.cache.page_allocator import PageAllocator
from sapwood_worker.core.cache.prefix_cache import PrefixCache
from sapwood_worker.core.scheduler.admission import Admission
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.running.running_batch import RunningBatch
from sapwood_worker.core.scheduler.speculation.speculation import Speculation
from sapwood_worker.core.scheduler.waiting.waiting_queue import WaitingQueue
from sapwood_worker.records.load import Load


class Demand(NamedTuple):
    """What a scheduler's next step could compute.

    Attributes:
        rows: Running requests.
        context: Tokens that they have cached.
        prompts: Tokens of prompts that are still to be computed, with those of the next few requests that there are rows for.
    """

    rows: int
    context: int
    prompts: int


_LOOKED_AT = 8
"""Waiting requests of which it is looked up how much they would have to compute."""


def measure_demand(running: RunningBatch, admissible: Iterable[Request], cached: Callable[[Request], int]) -> Demand:
    """The demand now; changes nothing.

    Args:
        running: What runs.
        admissible: The waiting requests that there are rows for, in their order.
        cached: Tells how many tokens of one the prefix cache has.
    """
    prompts = sum(request.remaining - cached(request) for request in islice(admissible, _LOOKED_AT))
    context = 0
    for request in running.requests:
        context += request.planned
        if (left := request.remaining) > 1:
            prompts += left
    return Demand(len(running), context, prompts)


def measure_load(
    waiting: WaitingQueue,
    running: RunningBatch,
    admission: Admission,
    allocator: PageAllocator,
    cache: PrefixCache,
    tiers: HierarchicalCache | None,
    page_size: int,
    forced_tokens: int,
    speculation: Speculation | None,
) -> Load:
    """The load now; changes nothing."""
    # Computes ``Request.remaining``, whose calls would take longer than all else here.
    left = [len(each.token_ids) + each.unknown - each.planned for each in running.requests]
    load = Load(
        running_requests=len(running),
        waiting_requests=len(waiting),
        queued_tokens=waiting.num_tokens + sum(tokens for tokens in left if tokens > 1),
        running_tokens=sum(each.planned for each in running.requests),
        used_pages=allocator.num_used,
        evictable_pages=cache.num_evictable,
        num_pages=allocator.num_pages,
        prompt_tokens=admission.prompt_tokens,
        cached_tokens=admission.cached_tokens,
        device_hit_tokens=admission.cached_tokens,
        forced_tokens=forced_tokens,
        drafted_tokens=0 if speculation is None else speculation.drafted_tokens,
        accepted_tokens=0 if speculation is None else speculation.accepted_tokens,
        drafts=0 if speculation is None else speculation.drafts,
        drafter="" if speculation is None else speculation.drafter_name,
        window_pages=sum(window.num_pages for window in cache.windows),
        used_window_pages=sum(window.num_used for window in cache.windows),
        passed_window_pages=sum(window.num_freed for window in cache.windows),
    )
    return load if tiers is None else _with_tiers(load, tiers, page_size)


def _with_tiers(load: Load, tiers: HierarchicalCache, page_size: int) -> Load:
    """A load with what the tiers below the device count."""
    load = msgspec.structs.replace(
        load,
        device_hit_tokens=tiers.counters.device_hits * page_size,
        host_hit_tokens=tiers.counters.host_hits * page_size,
        host_used_pages=tiers.host.num_ready,
        host_num_pages=tiers.host.num_pages,
    )
    if tiers.leases is not None:
        given = tiers.leases.counters
        load = msgspec.structs.replace(
            load,
            handoff_tickets=given.tickets,
            handoff_renewals=given.renewals,
            handoff_expired=given.expired,
            handoff_pages=tiers.leases.num_pinned,
        )
    if tiers.pulls is not None:
        pulled = tiers.pulls.counters
        load = msgspec.structs.replace(
            load,
            pulled_pages=pulled.pages,
            pulled_bytes=pulled.pages * tiers.pulls.page_bytes,
            pulled_early_bytes=pulled.early * tiers.pulls.page_bytes,
            pulled_part_bytes=tiers.pulls.part_bytes,
            pull_failures=pulled.failures,
            pull_stale_pages=pulled.stale,
            pull_fallbacks=pulled.fallbacks,
        )
    if tiers.storage is None:
        return load
    store, page_bytes = tiers.storage.counters, tiers.storage.page_bytes
    return msgspec.structs.replace(
        load,
        storage_hit_tokens=store.fetched * page_size,
        store_read_bytes=store.fetched * page_bytes,
        store_written_bytes=store.written * page_bytes,
        store_failures=tiers.storage.failures,
        store_rejected_pages=store.rejected,
        store_dropped_pages=store.dropped,
        store_timeouts=store.timeouts,
        storage_id=tiers.storage.store_id,
    )
