"""On what terms a request is served."""

from __future__ import annotations

import msgspec


class Terms(msgspec.Struct, frozen=True, array_like=True):
    """What a request says of its place among others.

    Attributes:
        priority: The higher goes first, where priorities count.
        tenant: Who it is for; tenants get equal shares.
        namespace: Requests of different namespaces share no cached pages; see
            ``sapwood_common.contract.page_hash.cache_namespace``.
        seconds: After so many it ends, wherever it stands; None: never.
    """

    priority: int = 0
    tenant: str = ""
    namespace: bytes = b""
    seconds: float | None = None


USUAL = Terms()
