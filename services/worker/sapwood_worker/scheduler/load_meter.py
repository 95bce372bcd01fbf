"""Measures a scheduler's load. O(running)."""

from __future__ import annotations

import msgspec

from sapwood_worker.cache.hierarchical import HierarchicalCache
from sapwood_worker.cache.page_allocator import PageAllocator
from sapwood_worker.cache.prefix_cache import PrefixCache
from sapwood_worker.scheduler.admission import Admission
from sapwood_worker.scheduler.load import Load
from sapwood_worker.scheduler.running_batch import RunningBatch
from sapwood_worker.scheduler.waiting_queue import WaitingQueue


def measure_load(
    waiting: WaitingQueue,
    running: RunningBatch,
    admission: Admission,
    allocator: PageAllocator,
    cache: PrefixCache,
    tiers: HierarchicalCache | None,
    page_size: int,
    forced_tokens: int,
) -> Load:
    """The load now; changes nothing."""
    # As ``remaining``, which would take longer than all else here.
    left = [len(each.token_ids) + each.unknown - each.planned for each in running.requests]
    load = Load(
        running_requests=len(running),
        waiting_requests=len(waiting),
        queued_tokens=waiting.num_tokens + sum(tokens for tokens in left if tokens > 1),
        used_pages=allocator.num_used,
        evictable_pages=cache.num_evictable,
        num_pages=allocator.num_pages,
        prompt_tokens=admission.prompt_tokens,
        cached_tokens=admission.cached_tokens,
        device_hit_tokens=admission.cached_tokens,
        forced_tokens=forced_tokens,
    )
    if tiers is None:
        return load
    return msgspec.structs.replace(
        load,
        device_hit_tokens=tiers.counters.device_hits * page_size,
        host_hit_tokens=tiers.counters.host_hits * page_size,
        storage_hit_tokens=0 if tiers.storage is None else tiers.storage.counters.fetched * page_size,
        host_used_pages=tiers.host.num_ready,
        host_num_pages=tiers.host.num_pages,
    )
