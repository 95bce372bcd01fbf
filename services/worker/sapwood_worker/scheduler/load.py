"""How busy a scheduler is."""

from __future__ import annotations

import msgspec


class Load(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A snapshot of the scheduler's load.

    Attributes:
        running_requests: Requests with a row in the page table.
        waiting_requests: Requests in the queue.
        queued_tokens: Tokens still to prefill over all of them.
        used_pages: Pages held by requests or by the prefix cache.
        evictable_pages: Of these, pages that only the prefix cache holds.
        num_pages: Pages in the pool.
        prompt_tokens: Prompt tokens of all requests that have run so far.
        cached_tokens: Of these, tokens found in the prefix cache.
        device_hit_tokens: Tokens found in its first tier, whenever a request was started; more than once for one sent back.
        host_hit_tokens: Tokens found in its second tier, beyond those.
        storage_hit_tokens: Tokens fetched from its third tier into the second.
        host_used_pages: Pages of the second tier that hold something.
        forced_tokens: Tokens of output that a grammar forced and no step sampled.
        host_num_pages: Pages of the second tier; 0: there is none.
    """

    running_requests: int = 0
    waiting_requests: int = 0
    queued_tokens: int = 0
    used_pages: int = 0
    evictable_pages: int = 0
    num_pages: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    storage_hit_tokens: int = 0
    host_used_pages: int = 0
    host_num_pages: int = 0
    forced_tokens: int = 0
