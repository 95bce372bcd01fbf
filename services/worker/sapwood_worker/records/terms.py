"""A request's priority, tenant, namespace and deadline."""

from __future__ import annotations

import msgspec


class Terms(msgspec.Struct, frozen=True, array_like=True):
    """How a request is ranked among others, and how long it may take.

    Attributes:
        priority: Higher goes first, where the policy heeds priorities.
        tenant: On whose behalf it runs; tenants get equal shares.
        namespace: Requests of different namespaces share no cached pages; see
            ``sapwood_common.contract.page_hash.cache_namespace``.
        seconds: Seconds after which it ends, finished or not; None: no limit.
    """

    priority: int = 0
    tenant: str = ""
    namespace: bytes = b""
    seconds: float | None = None


USUAL = Terms()
