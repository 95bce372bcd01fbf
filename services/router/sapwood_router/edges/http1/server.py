"""Listens, and answers each request in a task of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from sapwood_net.http2.server.turnstile import Turnstile
from sapwood_net.http2.server.waiting_line import Rank
from sapwood_net.pacing.body_memory import BodyMemory
from sapwood_net.pacing.tarpit import Tarpit
from sapwood_net.pacing.time_share import TimeShare
from sapwood_net.pacing.write_batch import WriteBatch
from sapwood_net.sockets.port import Port
from sapwood_net.sockets.tls import ServerTls
from sapwood_router.edges.http1.connection import HttpConnection
from sapwood_router.edges.http1.head import Headers, HeadReader
from sapwood_router.edges.http1.host import ConnectionLimits, HostedConnection
from sapwood_router.edges.http1.request import Request
from sapwood_router.edges.http1.response_head import ResponseHeads

logger = logging.getLogger(__name__)

KEEP_ALIVE = 620.0
"""Seconds that an idle connection stays open: longer than those in front keep it (AWS's load balancers 60, Google's 600, Go's
client 90). The side that closes first loses a request that the other side is just sending."""

_INPUT_BYTES = 64 * 1024
_STOP_SECONDS = 1.0
_SWEEP_SECONDS = 5.0
_TLS_SECONDS = 10.0
"""Seconds that a TLS handshake may take."""
_TLS_END_SECONDS = 1.0
"""Seconds that the goodbye of an idle TLS connection may take."""
_FAILED = b"internal error\n"

Handler = Callable[[Request], Awaitable[None]]


class HttpServer:
    """Serves a handler on one port. Implements :class:`ConnectionHost`.

    Args:
        handler: Answers each request.
        host: Address to listen on.
        port: 0 takes a free one.
        rank: Which of the requests that come at once begin first, by their headers.
        tls: Certificate, key and the clients' CA, read again when the files change; None is plain text.
        bodies: The memory of all bodies while they are received.
        most_connections: Beyond it, the one that has been idle the longest makes room; if none is idle, the new one is closed.
        limits: Each connection's limits.
        keep_alive: Seconds that an idle connection stays open.
    """

    def __init__(
        self,
        handler: Handler,
        host: str,
        port: int,
        rank: Callable[[Headers], Rank],
        tls: ServerTls | None = None,
        *,
        bodies: BodyMemory,
        most_connections: int,
        limits: ConnectionLimits | None = None,
        keep_alive: float = KEEP_ALIVE,
    ) -> None:
        self.host = host
        self.limits = limits or ConnectionLimits()
        self.share = TimeShare()
        self.turnstile = Turnstile()
        self.breaths = Turnstile()
        self.writes = WriteBatch()
        self.heads = ResponseHeads()
        self.requests = HeadReader()
        self.bodies = bodies
        self.tarpit = Tarpit(self.limits.held_seconds)
        self.input = memoryview(bytearray(_INPUT_BYTES))
        self.rank = rank
        self.stopping = False
        self._handler = handler
        self._port = Port(host, port, tls, handshake=_TLS_SECONDS, shutdown=_TLS_END_SECONDS)
        self._most_connections = most_connections
        self._keep_alive = keep_alive
        self._connections: set[HostedConnection] = set()
        self._idle: dict[HostedConnection, None] = {}
        """Connections without a request, in the order in which they became idle."""
        self._tasks: set[asyncio.Task[None]] = set()
        self.loop: asyncio.AbstractEventLoop
        self._sweeper: asyncio.TimerHandle | None = None
        self._alone: asyncio.Future[None] | None = None
        """Done once the last connection of a server that stops is gone."""

    @property
    def connections(self) -> frozenset[HostedConnection]:
        """The connections that are open now."""
        return frozenset(self._connections)

    async def start(self) -> int:
        """Listens and serves. Returns the port.

        Raises:
            ConfigError: The address cannot be listened on.
        """
        self.loop = asyncio.get_running_loop()
        port = self._port.open(lambda: HttpConnection(self))
        self._sweep()
        return port

    async def stop(self) -> None:
        """Closes the listener and all connections; a request still running gets a second."""
        self.stopping = True
        self._port.close()
        self.tarpit.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in tuple(self._connections):
            connection.close()
        if self._connections:
            self._alone = asyncio.get_running_loop().create_future()
            await asyncio.wait((self._alone,), timeout=_STOP_SECONDS)
        running = tuple(self._tasks)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for connection in tuple(self._connections):
            connection.abort()

    def begin(self, request: Request) -> None:
        task = self.loop.create_task(self._answer(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def made(self, connection: HostedConnection) -> None:
        self._connections.add(connection)
        if self.stopping:
            connection.close()
        elif len(self._connections) > self._most_connections:
            next(iter(self._idle), connection).abort()

    def rests(self, connection: HostedConnection) -> None:
        self._idle[connection] = None

    def works(self, connection: HostedConnection) -> None:
        self._idle.pop(connection, None)

    def lost(self, connection: HostedConnection) -> None:
        self._connections.discard(connection)
        self._idle.pop(connection, None)
        self.bodies.lost_connection()
        if not self._connections and self._alone is not None and not self._alone.done():
            self._alone.set_result(None)

    async def _answer(self, request: Request) -> None:
        try:
            await self._handler(request)
        except Exception:
            logger.exception("%s %s failed", request.head.method, request.head.path)
        if request.over:
            return
        if request.started or self.stopping:
            request.abort()  # or the client would wait for the rest
        else:
            await request.respond(500, (), _FAILED)

    def _sweep(self) -> None:
        """Closes connections that have been idle for long enough."""
        loop = asyncio.get_running_loop()
        self._sweeper = loop.call_later(min(_SWEEP_SECONDS, self._keep_alive), self._sweep)
        for connection in tuple(self._idle):
            if connection.rests_since + self._keep_alive > loop.time():
                break
            connection.close()
