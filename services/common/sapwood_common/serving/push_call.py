"""A call whose responses are pushed: written by whoever has them, and not yielded by its handler."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import grpc

from sapwood_common.tenants.tenant import Tenant


class PushCall(Protocol):
    """What contexts of every server here have beside what ``grpc.aio.ServicerContext`` says.

    Attributes:
        tenant: Whose key it came with; None where none was asked for.
    """

    tenant: Tenant | None

    def is_ready(self) -> bool:
        """Whether a response that is written now leaves at once; else it had better wait for more to come with it."""
        ...

    def write_now(self, message: Any) -> None:
        """Sends a response, without waiting. For those who ask :meth:`is_ready` before."""
        ...

    async def drained(self) -> None:
        """Returns once :meth:`is_ready`, or once the client has left."""
        ...

    def done(self) -> bool:
        """Whether it is over."""
        ...

    def set_initial_metadata(self, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """What the response begins with, at its first message or its end."""
        ...

    def give_up(self, code: grpc.StatusCode, details: str) -> None:
        """Ends the call, without waiting until the client has taken what was written."""
        ...
