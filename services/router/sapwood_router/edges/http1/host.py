"""The shared state and the limits of connections."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from sapwood_net.http2.server.turnstile import Turnstile
from sapwood_net.http2.server.waiting_line import Rank
from sapwood_net.pacing.body_memory import BodyMemory
from sapwood_net.pacing.tarpit import HELD_SECONDS, Tarpit
from sapwood_net.pacing.time_share import TimeShare
from sapwood_net.pacing.write_batch import WriteBatch
from sapwood_router.edges.http1.head import Headers, HeadReader
from sapwood_router.edges.http1.request import Request
from sapwood_router.edges.http1.response_head import ResponseHeads


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What a client may take; times in seconds.

    Attributes:
        head_bytes: Most bytes of a request's line and headers, and of what waits while a request is answered.
        head_seconds: From a head's first byte to its last.
        body_seconds: In each such time ``body_bytes`` of a body that is waited for must come, or the rest of it.
        body_bytes: See there.
        linger_seconds: After a last answer, for the client to read it and leave. Who still sends ``body_bytes`` of a refused body
            in that time has as long again.
        flush_seconds: A client that reads nothing for this long loses the data sent to it.
        held_seconds: For which the connection of a client that broke a rule is held (:class:`Tarpit`).
    """

    head_bytes: int = 64 * 1024
    head_seconds: float = 60.0
    body_seconds: float = 30.0
    body_bytes: int = 64 * 1024
    linger_seconds: float = 2.0
    flush_seconds: float = 60.0
    held_seconds: float = HELD_SECONDS


class HostedConnection(Protocol):
    """A connection, as its server knows it.

    Attributes:
        rests_since: When the client was last answered, on the event loop's clock.
    """

    rests_since: float

    def close(self) -> None:
        """Closes an idle connection; one whose request is being answered closes after the answer if the host is stopping."""
        ...

    def abort(self) -> None:
        """Closes at once."""
        ...


class ConnectionHost(Protocol):
    """The server, as its connections know it."""

    loop: asyncio.AbstractEventLoop
    """The loop that the server runs on: to ask for the running loop takes a system call."""
    limits: ConnectionLimits
    share: TimeShare
    turnstile: Turnstile
    """Begins requests."""
    breaths: Turnstile
    """Lets connections that have filled ``input`` read on later: what one turn reads is bounded, however many clients send."""
    writes: WriteBatch
    heads: ResponseHeads
    requests: HeadReader
    bodies: BodyMemory
    tarpit: Tarpit
    """Keeps connections whose clients broke a rule until they end."""
    input: memoryview
    """Every read goes into this buffer first, for all connections."""
    stopping: bool

    def rank(self, headers: Headers) -> Rank:
        """When a request begins that comes with many others."""
        ...

    def begin(self, request: Request) -> None:
        """Answers a request."""
        ...

    def made(self, connection: HostedConnection) -> None:
        """A client has connected."""
        ...

    def rests(self, connection: HostedConnection) -> None:
        """The client has been answered, or has asked nothing yet."""
        ...

    def works(self, connection: HostedConnection) -> None:
        """It has sent the head of a request, or is being closed."""
        ...

    def lost(self, connection: HostedConnection) -> None:
        """The connection is over."""
        ...
