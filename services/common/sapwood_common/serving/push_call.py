"""A call whose responses are pushed: code outside the handler writes them, and the handler yields none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import grpc

from sapwood_common.tenants.tenant import Tenant


class PushCall(Protocol):
    """The methods that both servers' contexts have, in addition to those of ``grpc.aio.ServicerContext``.

    Attributes:
        tenant: The tenant whose key it came with; None where no key is asked for.
    """

    tenant: Tenant | None

    def is_ready(self) -> bool:
        """Whether a response that is written now leaves at once. If not, it is better sent later, together with others."""
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
        """Sets the metadata with which the response begins, sent with its first message or its end."""
        ...

    def give_up(self, code: grpc.StatusCode, details: str) -> None:
        """Ends the call at once, though the client may not have taken what was written."""
        ...
