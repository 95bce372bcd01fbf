"""Decides by a call's headers whether the call is accepted, before any of its messages is read, decompressed or parsed."""

from __future__ import annotations

from typing import Any, Protocol

from sapwood_net.http2.server.waiting_line import Rank
from sapwood_net.http2.wire.header_reader import Headers

Tenant = Any
"""The tenant whose key a call came with: the gate returns it, handlers find it at the call, and nothing here looks at it."""


class Gate(Protocol):
    """Decides for a server's port which calls may begin, and in which order."""

    @property
    def asks_for_keys(self) -> bool:
        """Whether calls without a known key are refused, except to open methods."""
        ...

    def let_in(self, method: str, headers: Headers) -> Tenant | None:
        """Asked once a call.

        Args:
            method: The full name of a method that is served.
            headers: The call's header fields.

        Returns:
            Whose key the call came with; None if it needs none.

        Raises:
            CallError: The call is refused.
        """
        ...

    def rank(self, headers: Headers, tenant: Tenant | None) -> Rank:
        """When an accepted call begins if it has to wait; a caller of None is counted by its connection."""
        ...
