"""A worker as routing sees it."""

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


class WorkerView(msgspec.Struct, frozen=True, gc=False):
    """A worker at the moment of a decision. Policies see only this.

    Attributes:
        address: Names the worker.
        page_size: Tokens a page of its KV cache holds.
        requests: Requests on it: this router's, as counted here, and other routers', as last reported.
        queued_tokens: Prompt tokens it still has to prefill, counted in the same way.
        used_share: Share of its pages that running requests hold, as last reported, 0 to 1.
        recent_work: Work this router gave it lately, in tokens to prefill; decays with a half-life of a minute.
        storage_id: Names the store its KV cache reads from, as last reported; workers of one name share it. Empty: none.
    """

    address: str
    page_size: int = 16
    requests: int = 0
    queued_tokens: int = 0
    used_share: float = 0.0
    recent_work: float = 0.0
    storage_id: str = ""
