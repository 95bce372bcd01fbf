"""Listens, and answers gRPC calls with the handlers that generated code knows, each call in a task of its own."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any, Protocol

from h2.errors import ErrorCodes

from sapwood_net.errors import CallError, ResourceExhaustedError
from sapwood_net.http2.server.call import ServerCall
from sapwood_net.http2.server.connection import MOST_STREAMS, MOST_UNKNOWN_STREAMS, ServerConnection
from sapwood_net.http2.server.gate import Gate, Tenant
from sapwood_net.http2.server.limits.lifetime import Timeouts
from sapwood_net.http2.server.limits.shared import SharedLimits
from sapwood_net.http2.server.refusal import StatusOf, find_problem, refusal
from sapwood_net.http2.server.running_call import Handler, RunningCall
from sapwood_net.http2.server.stream import ServerStream
from sapwood_net.http2.server.turnstile import Turnstile
from sapwood_net.http2.server.waiting_line import Place, Rank
from sapwood_net.http2.wire.frames import ConnectionFailedError
from sapwood_net.http2.wire.request_head import RequestHead
from sapwood_net.pacing.body_memory import BodyMemory
from sapwood_net.pacing.heavy_work import HeavyWork
from sapwood_net.pacing.tarpit import Tarpit

logger = logging.getLogger(__name__)

_CHECKS = 4
"""How often connections are checked within the shortest of their timeouts."""
_CHECKED_AT_ONCE = 64
"""Connections that are checked in one turn of the event loop."""
_MOST_CONNECTIONS, _LOOKED_AT = 16_384, 64
"""If there are more, the server closes an old connection that has no calls, or else the new one."""
_MESSAGES_HELD = 4
"""How many messages of the largest size may be in memory at a time."""

Wrap = Callable[[str, Handler], Handler]
_STOP_SECONDS = 5.0
_FEW_CALLS = 2
"""Calls of a connection without a key beyond which its next ones begin after those of connections that have fewer."""
_MOST_UNKNOWN_BYTES = 64 * 1024
"""Bytes of the largest request of a call that needs no key where others do: for health and reflection."""


class Listener(Protocol):
    """Where a server listens: a port, with TLS or without."""

    def open(self, make: Callable[[], asyncio.BaseProtocol]) -> int:
        """Listens; ``make`` makes the protocol of each connection. Returns the port's number."""
        ...

    def close(self) -> None:
        """Listens no more."""
        ...


class Http2Server:
    """A gRPC server. Implements ``ConnectionOwner``.

    Life cycle: construct, :meth:`add_registered_method_handlers` (generated ``add_...Servicer_to_server`` do), :meth:`start`,
    :meth:`stop`.

    Args:
        wrap: Called once a method with its full name; returns the handler that is used.
        most_bytes: The largest request.
        status_of: Says what ends a call with an error.
        gate: Decides which callers are accepted, and which of simultaneous calls begin first; None: all callers, each connection
            in turn.
        timeouts: How long clients may take, and be silent or idle.
        memory: Bounds what messages hold; None: four times the largest, for this server alone.
        heavy: Spaces out the parsing of large messages; None: this server's alone.
    """

    def __init__(
        self,
        wrap: Wrap,
        most_bytes: int,
        status_of: StatusOf,
        gate: Gate | None = None,
        timeouts: Timeouts | None = None,
        memory: BodyMemory | None = None,
        heavy: HeavyWork | None = None,
    ) -> None:
        self._wrap = wrap
        self._status_of = status_of
        self._gate = gate
        self._asks_for_keys = gate is not None and gate.asks_for_keys
        self._most_bytes = most_bytes
        self._timeouts = timeouts or Timeouts()
        self._handlers: dict[bytes, Handler] = {}
        self._listener: Listener | None = None
        self._connections: dict[ServerConnection, None] = {}
        """The oldest first."""
        self._running: set[RunningCall] = set()
        self._turnstile = Turnstile()
        tarpit = Tarpit(self._timeouts.held)
        bounds = memory or BodyMemory(_MESSAGES_HELD * most_bytes)
        self._shared = SharedLimits(bounds, tarpit=tarpit, heavy=heavy or HeavyWork(), gate=gate)
        self._failed: Counter[ErrorCodes] = Counter()
        """Connections that were closed because their clients broke a rule, since the last line of the log about them."""
        self._last_failed = ""
        self._stopping = False
        self._checker: asyncio.Task[None] | None = None
        self._alone: asyncio.Future[None] | None = None
        """Done once the last connection of a server that stops is gone."""

    @property
    def connections(self) -> frozenset[ServerConnection]:
        """The connections that are open now."""
        return frozenset(self._connections)

    @property
    def waiting(self) -> int:
        """Calls that wait for their turn to begin."""
        return self._turnstile.waiting

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Sequence[Any]) -> None:
        """Adds nothing: generated code adds the same methods by :meth:`add_registered_method_handlers`, too."""

    def add_registered_method_handlers(self, service_name: str, method_handlers: dict[str, Handler]) -> None:
        """Adds a service's methods."""
        for name, handler in method_handlers.items():
            method = f"/{service_name}/{name}"
            self._handlers[method.encode()] = self._wrap(method, handler)

    async def start(self, listener: Listener) -> int:
        """Listens. Returns the port's number. Raises what the listener does."""
        chosen = listener.open(self._connect)
        self._listener = listener
        self._checker = asyncio.create_task(self._check(), name="connections' liveness")
        return chosen

    async def stop(self, grace: float) -> None:
        """Listens no more, and gives running calls ``grace`` seconds before their clients lose them."""
        if self._listener is None:
            return
        self._stopping = True
        self._listener.close()
        self._shared.tarpit.close()
        if self._checker is not None:
            self._checker.cancel()
        for connection in tuple(self._connections):
            connection.close_gently()
        if self._connections:
            self._alone = asyncio.get_running_loop().create_future()
            await asyncio.wait((self._alone,), timeout=grace)
        running = tuple(self._running)
        for call in running:
            call.shut()
        for connection in tuple(self._connections):
            connection.close()
        over = await asyncio.gather(*(call.over(_STOP_SECONDS) for call in running))
        if not all(over):
            logger.error("%d handlers do not end though they were cancelled", over.count(False))

    def _connect(self) -> ServerConnection:
        most_streams = MOST_UNKNOWN_STREAMS if self._asks_for_keys else MOST_STREAMS
        return ServerConnection(
            self, self._most_bytes, most_streams, self._shared, self._timeouts, stranger=self._asks_for_keys
        )

    def connection_made(self, connection: ServerConnection) -> None:
        self._connections[connection] = None
        self._shared.count_connections(len(self._connections))
        if self._stopping:  # it was on its way when the others were ended
            connection.close_gently()
        elif len(self._connections) > _MOST_CONNECTIONS:
            oldest = islice(self._connections, _LOOKED_AT)
            next((each for each in oldest if each.idle), connection).close_gently()

    def connection_lost(self, connection: ServerConnection) -> None:
        self._connections.pop(connection, None)
        self._shared.memory.lost_connection()
        self._shared.count_connections(len(self._connections))
        if not self._connections and self._alone is not None and not self._alone.done():
            self._alone.set_result(None)

    async def _check(self) -> None:
        loop = asyncio.get_running_loop()
        interval = self._timeouts.shortest / _CHECKS
        while True:
            due = loop.time() + interval
            await asyncio.sleep(interval)
            self._report_failed(interval)
            if loop.time() - due > interval / 2:
                continue  # this loop was held up: what clients said may wait to be read
            for number, connection in enumerate(tuple(self._connections), 1):
                connection.check(loop.time())
                if number % _CHECKED_AT_ONCE == 0:
                    await asyncio.sleep(0)

    def _report_failed(self, seconds: float) -> None:
        """One line, however many there were: who floods shall not flood the log, too."""
        if self._failed:
            counts = ", ".join(f"{code.name} {count}" for code, count in self._failed.most_common())
            logger.info("connections that were closed in %g s: %s; the last: %s", seconds, counts, self._last_failed)
            self._failed.clear()

    def connection_failed(self, connection: ServerConnection, error: ConnectionFailedError) -> None:
        self._failed[error.code] += 1
        self._last_failed = f"{connection.peer}: {error}"
        logger.debug(self._last_failed)

    def open_call(self, connection: ServerConnection, stream: ServerStream, head: RequestHead) -> None:
        fields = head.fields
        path = fields.get(b":path", b"")
        handler = self._handlers.get(path)
        problem = find_problem(handler, fields)
        tenant: Tenant | None = None
        if problem is None and self._gate is not None:
            try:
                tenant = self._gate.let_in(path.decode("latin-1"), head.headers)
            except CallError as error:
                stream.finish(refusal(*self._status_of(error)))
                if not isinstance(error, ResourceExhaustedError):  # a known caller's, who learns when to come again
                    connection.count_refused()
                return
        if problem is not None or handler is None:
            stream.finish(problem or b"")
            connection.count_refused()
            return
        most_bytes = self._most_bytes
        if tenant is not None:
            connection.know()
        elif self._asks_for_keys:
            most_bytes = _MOST_UNKNOWN_BYTES
            stream.take_at_most(most_bytes)
        call = ServerCall(
            stream,
            head,
            connection.peer,
            handler.request_deserializer or bytes,
            handler.response_serializer or bytes,
            most_bytes,
            self._status_of,
            self._shared,
            tenant,
            one_request=not handler.request_streaming,
        )
        stream.follow(call)
        running = RunningCall(call, handler, self._running, partial(self._enter, connection), self._shared.exits)
        call.follow(None if handler.request_streaming else running.start, running.cancel)
        if handler.request_streaming:
            running.start()

    def _enter(self, connection: ServerConnection, begin: Callable[[], None], call: ServerCall) -> Place | None:
        if not self._turnstile.busy:
            return self._turnstile.enter(begin)
        rank = Rank() if self._gate is None else self._gate.rank(call.headers, call.tenant)
        if rank.caller is None:
            rank = rank._replace(caller=connection.peer, many=connection.open_calls > _FEW_CALLS)
        return self._turnstile.enter(begin, rank)
