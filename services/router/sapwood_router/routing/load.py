"""A worker's load, as it reports it."""

from __future__ import annotations

import msgspec


class Load(msgspec.Struct, frozen=True):
    """One report; fields as in ``LoadReport`` of ``worker.proto``."""

    running_requests: int = 0
    waiting_requests: int = 0
    queued_tokens: int = 0
    used_pages: int = 0
    evictable_pages: int = 0
    num_pages: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    epoch: int = 0
    kv_seq: int = 0
    kv_digest: int = 0
    host_used_pages: int = 0
    host_num_pages: int = 0
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    storage_hit_tokens: int = 0
    storage_id: str = ""
    running_tokens: int = 0
