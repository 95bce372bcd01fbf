"""grpcio's asyncio server in the place of :class:`~sapwood_net.http2.server.server.Http2Server`: a fallback.

docs/operations.md says what differs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import grpc

from sapwood_common.errors import ConfigError, InvalidArgumentError, SapwoodError
from sapwood_common.serving.grpcio_call import GrpcioCall
from sapwood_common.status import rpc_status
from sapwood_net.http2.server.gate import Gate
from sapwood_net.http2.server.limits.lifetime import Timeouts
from sapwood_net.sockets.port import Port
from sapwood_net.sockets.tls import ServerTls
from sapwood_net.sockets.unix_socket import is_unix, listen_unix, port_of

Handler = Any
"""``grpc.RpcMethodHandler``, whose attributes the stubs do not know."""
_MOST_METADATA = 64 * 1024
_MOST_STREAMS = 16384


class GrpcioServer:
    """A gRPC server with the life cycle of ``Http2Server``.

    Args:
        wrap: Called once a method with its full name; returns the handler that is used.
        most_bytes: The largest request.
        gate: Decides which callers are accepted; None: all.
    """

    def __init__(
        self,
        wrap: Callable[[str, Handler], Handler],
        most_bytes: int,
        gate: Gate | None = None,
    ) -> None:
        self._wrap = wrap
        self._most_bytes = most_bytes
        self._gate = gate
        self._services: dict[str, dict[str, Handler]] = {}
        self._server: grpc.aio.Server | None = None

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Sequence[Any]) -> None:
        """Adds nothing: generated code adds the same methods by :meth:`add_registered_method_handlers`, too."""

    def add_registered_method_handlers(self, service_name: str, method_handlers: dict[str, Handler]) -> None:
        """Adds a service's methods."""
        self._services[service_name] = {
            name: self._adapt(f"/{service_name}/{name}", handler) for name, handler in method_handlers.items()
        }

    async def start(self, port: Port) -> int:
        """Listens. Returns the port's number.

        Raises:
            ConfigError: The address cannot be listened on.
        """
        self._server = server = grpc.aio.server(options=_options(self._most_bytes, port, Timeouts()))
        for name, handlers in self._services.items():
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
        address, number = _address(port)
        try:
            if port.tls is None:
                chosen = server.add_insecure_port(address)
            else:
                chosen = server.add_secure_port(address, _credentials(port.tls))
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {address}: {error}; is the port in use?") from error
        await server.start()
        return number or chosen

    async def stop(self, grace: float) -> None:
        """Listens no more, and gives running calls ``grace`` seconds before their clients lose them."""
        if self._server is not None:
            await self._server.stop(grace)

    def _adapt(self, method: str, handler: Handler) -> Handler:
        """The handler for grpcio: asks the gate, and passes its servicer a :class:`GrpcioCall`."""
        handler, gate = self._wrap(method, handler), self._gate
        behavior = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        parse = handler.request_deserializer or bytes

        async def answer(received: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            call = GrpcioCall(context, None)
            response: Any = None
            try:
                if gate is not None:
                    call.tenant = gate.let_in(method, _headers(context))
                request = _parse_all(parse, received) if handler.request_streaming else _parse(parse, received)
                answering = behavior(request, call)
                if handler.response_streaming:
                    async with aclosing(answering) as responses:
                        async for item in responses:
                            call.write_now(item)
                            await call.drained()
                else:
                    response = await answering
                await call.flush()
            except SapwoodError as error:  # the gate's or a request's: servicers' have passed the interceptor
                await call.abort(*rpc_status(error))
            except asyncio.CancelledError:
                await call.end_if_given_up()
                raise
            return response

        make = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[handler.request_streaming, handler.response_streaming]
        return make(answer, None, handler.response_serializer)


def _address(port: Port) -> tuple[str, int]:
    """Where grpcio listens, and the number if that is known before."""
    if is_unix(port.host):
        with listen_unix(port.host, port.number, 1) as found:  # grpcio takes its place
            number = port_of(found)
        return f"{port.host}:{number}", number
    host = port.host if port.host.startswith("[") or ":" not in port.host else f"[{port.host}]"
    return f"{host}:{port.number}", port.number


def _parse(parse: Callable[[bytes], Any], message: bytes) -> Any:
    try:
        return parse(message)
    except Exception as error:
        raise InvalidArgumentError("the request is not a valid message of its type") from error


async def _parse_all(parse: Callable[[bytes], Any], messages: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    async for message in messages:
        yield _parse(parse, message)


def _headers(context: grpc.aio.ServicerContext[Any, Any]) -> list[tuple[bytes, bytes]]:
    metadata = context.invocation_metadata() or ()
    return [(key.encode(), value if isinstance(value, bytes) else value.encode()) for key, value in metadata]


def _options(most_bytes: int, port: Port, timeouts: Timeouts) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", most_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_concurrent_streams", _MOST_STREAMS),
        ("grpc.max_metadata_size", _MOST_METADATA),
        ("grpc.absolute_max_metadata_size", _MOST_METADATA),
        ("grpc.so_reuseport", int(port.reuse)),
        ("grpc.server_handshake_timeout_ms", round(1000 * port.handshake)),
        ("grpc.max_connection_idle_ms", round(1000 * timeouts.idle)),
        ("grpc.keepalive_time_ms", round(1000 * timeouts.silence)),
        ("grpc.keepalive_timeout_ms", round(1000 * timeouts.silence)),
        # Services' own channels ping more often than grpcio's server takes by itself.
        ("grpc.http2.max_ping_strikes", 0),
    ]


def _credentials(tls: ServerTls) -> grpc.ServerCredentials:
    """Credentials that each handshake reads from the files."""

    def read() -> grpc.ServerCertificateConfiguration:
        roots = None if tls.client_ca is None else tls.client_ca.read_bytes()
        return grpc.ssl_server_certificate_configuration([(tls.key.read_bytes(), tls.cert.read_bytes())], roots)

    # grpcio keeps its present files if this raises, and if the files do not belong together.
    return grpc.dynamic_ssl_server_credentials(read(), read, tls.client_ca is not None)
