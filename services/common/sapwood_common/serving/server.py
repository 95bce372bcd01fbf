"""Server bootstrap: health, reflection, request limits, and a drain that finishes running calls and refuses new ones."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Literal, Protocol, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sapwood_common.network.channel import MAX_MESSAGE_BYTES
from sapwood_common.secret_file import warn_of_readers
from sapwood_common.serving.gate import ServiceGate
from sapwood_common.serving.grpcio_server import GrpcioServer
from sapwood_common.serving.interceptor import MOST_FIELDS, MOST_FIELDS_OF_SERVICES, ServiceInterceptor
from sapwood_common.serving.reflection import add_reflection
from sapwood_common.serving.rpc_telemetry import RpcTelemetry
from sapwood_common.serving.stop_signal import stop_signal
from sapwood_common.status import rpc_status
from sapwood_common.telemetry.logs import announce
from sapwood_common.telemetry.metrics import MetricSet
from sapwood_common.telemetry.tracing import Tracing
from sapwood_net.http2.server.gate import Gate
from sapwood_net.http2.server.server import Http2Server
from sapwood_net.pacing.body_memory import BodyMemory
from sapwood_net.pacing.heavy_work import HeavyWork
from sapwood_net.sockets.port import Port
from sapwood_net.sockets.tls import ServerTls

logger = logging.getLogger(__name__)

_HEALTH = "grpc.health.v1.Health"
LIVENESS = "liveness"
"""The health service that says SERVING as long as this process answers at all, also while it loads or drains."""


READINESS = "readiness"
"""The health service that says what the server as a whole says, for those who ask by name."""


Implementation = Literal["sapwood", "grpcio"]
"""Which server speaks gRPC: the one of ``sapwood_net.http2``, or grpcio's."""


class _Server(Protocol):
    async def start(self, port: Port, /) -> int: ...

    async def stop(self, grace: float) -> None: ...


class ServiceServer:
    """A gRPC server with the standard health and reflection services and one interceptor for all methods.

    Life cycle: construct, add servicers to ``grpc``, ``start``, ``set_serving(True)`` once ready, ``drain``, ``stop``.

    Args:
        host: Address to listen on, such as ``127.0.0.1`` or ``0.0.0.0``.
        port: Port to listen on; 0 takes a free one.
        service_names: Full names of the services added, for health and reflection.
        uncounted: Full method names of long-lived calls that must not hold up :meth:`drain`.
        telemetry: Measures the calls; None: they are not measured.
        tls: Certificate and key; None is plain text.
        gate: Decides which callers are accepted (health and reflection are open), and which of simultaneous calls begin first;
            None: all callers, each connection in turn.
        max_request_bytes: The largest message it takes.
        memory: What messages may hold until they are done with; None: four times the largest. grpcio's server has no bound.
        heavy: Spaces out the parsing of large messages among all that is heavy; None: among themselves.
        reuse_port: Whether other processes listen on the same port; each takes some of the connections.
        health_address: ``host:port`` on which the health service alone is served, in plain text; None: nowhere.
        health_names: Further names that health knows.
        implementation: Which server speaks gRPC.
    """

    def __init__(
        self,
        host: str,
        port: int,
        service_names: Sequence[str],
        *,
        uncounted: frozenset[str] = frozenset(),
        telemetry: RpcTelemetry | None = None,
        tls: ServerTls | None = None,
        gate: Gate | None = None,
        max_request_bytes: int = MAX_MESSAGE_BYTES,
        memory: BodyMemory | None = None,
        heavy: HeavyWork | None = None,
        reuse_port: bool = False,
        health_address: str | None = None,
        health_names: Sequence[str] = (),
        implementation: Implementation = "sapwood",
    ) -> None:
        self._names = (*service_names, *health_names)
        if tls is not None:
            warn_of_readers(tls.key, "--tls-key")
        telemetry = telemetry or RpcTelemetry(MetricSet(), Tracing())
        most_fields = MOST_FIELDS_OF_SERVICES if gate is None else MOST_FIELDS
        self._interceptor = ServiceInterceptor(telemetry, uncounted, most_fields)
        self._health = HealthServicer()
        self.draining = asyncio.Event()
        """Set when draining begins: long-lived calls end on it."""
        self._port = Port(host, port, tls, alpn=("h2",), reuse=reuse_port)
        watched = None if gate is None else ServiceGate(gate, telemetry)

        def make(gate: Gate | None) -> _Server:
            if implementation == "grpcio":
                return GrpcioServer(self._interceptor.wrap, max_request_bytes, gate)
            return Http2Server(self._interceptor.wrap, max_request_bytes, rpc_status, gate, memory=memory, heavy=heavy)

        self._server = make(watched)
        self.grpc = _as_grpc_server(self._server)
        """Where generated code adds servicers."""
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        self._health_server: tuple[_Server, Port] | None = None
        if health_address is not None:
            health_host, _, health_port = health_address.rpartition(":")
            server = make(None)
            health_pb2_grpc.add_HealthServicer_to_server(self._health, _as_grpc_server(server))
            self._health_server = server, Port(health_host, int(health_port), reuse=reuse_port)
        add_reflection(self.grpc, (*service_names, _HEALTH))

    async def start(self) -> int:
        """Listens; health says NOT_SERVING until :meth:`set_serving`. Returns the port.

        Raises:
            ConfigError: An address cannot be listened on.
        """
        await self.set_serving(False)
        if self._health_server is not None:
            server, port = self._health_server
            announce(logger, "health listening on %s:%d", port.host, await server.start(port))
        return await self._server.start(self._port)

    async def set_serving(self, serving: bool) -> None:
        """Sets the health of the server as a whole (``""``) and of each of its services."""
        for name in ("", *self._names):
            self._health.set(name, serving)
        self._health.set(LIVENESS, True)

    async def drain(self, timeout: float) -> bool:
        """Turns unhealthy, refuses new calls, and waits for running ones.

        Returns:
            Whether all of them ended within ``timeout`` seconds.
        """
        await self.set_serving(False)
        self._interceptor.refuse_new()
        self.draining.set()
        try:
            await asyncio.wait_for(self._interceptor.idle.wait(), timeout)
        except TimeoutError:
            return False
        return True

    async def stop(self, grace: float = 0.2) -> None:
        """Closes the server; calls still running get ``grace`` seconds for their last message, then end UNAVAILABLE."""
        await self._server.stop(grace)
        if self._health_server is not None:
            await self._health_server[0].stop(0)


def _as_grpc_server(server: _Server) -> grpc.aio.Server:
    """The server in the eyes of generated code, which only adds methods."""
    return cast(grpc.aio.Server, server)


async def serve_until_stopped(
    server: ServiceServer, *, drain_timeout: float, drained: Callable[[], Awaitable[None]] | None = None
) -> None:
    """Serves until SIGTERM or SIGINT, then drains and stops.

    Args:
        server: A started server.
        drain_timeout: Seconds given to running calls and to ``drained`` together.
        drained: Waits for work that is not a counted gRPC call, such as HTTP requests.
    """
    await stop_signal().wait()
    loop = asyncio.get_running_loop()
    deadline = loop.time() + drain_timeout
    complete = await server.drain(drain_timeout)
    if drained is not None:
        try:
            await asyncio.wait_for(drained(), max(0.0, deadline - loop.time()))
        except TimeoutError:
            complete = False
    logger.info("drained" if complete else f"still busy after {drain_timeout:g} s: stopping anyway")
    await server.stop()


# The standard gRPC health service: Check, List and Watch.
_State = health_pb2.HealthCheckResponse


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """The states of services by name; ``""`` is the server as a whole.

    grpcio-health-checking's own servicer holds a lock while it writes to a watcher: a watcher that reads nothing would keep a
    server from saying that it drains. It has no List either.
    """

    def __init__(self) -> None:
        self._states: dict[str, int] = {}
        self._changed = asyncio.Event()
        """Set at the next change; a new event then takes its place."""

    def set(self, name: str, serving: bool) -> None:
        """Sets a service's state; watchers get a message."""
        self._states[name] = _State.SERVING if serving else _State.NOT_SERVING
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Check(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:  # noqa: N802
        """The state of one service; NOT_FOUND for a name that is none."""
        if request.service not in self._states:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {request.service!r} here")
        return _State(status=self._states[request.service])

    async def List(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:  # noqa: N802
        """The state of every service."""
        states = {name: _State(status=state) for name, state in self._states.items()}
        return health_pb2.HealthListResponse(statuses=states)

    async def Watch(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:  # noqa: N802
        """The state of one service now and after each change; SERVICE_UNKNOWN for a name that is none yet."""
        reported = None
        while True:
            changed, state = self._changed, self._states.get(request.service, _State.SERVICE_UNKNOWN)
            if state != reported:
                reported = state
                yield _State(status=state)
            await changed.wait()
