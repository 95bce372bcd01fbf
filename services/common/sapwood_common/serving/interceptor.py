"""Wraps every handler of a service: statuses, request ids, refusal while draining, the count of running calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn, cast

import grpc
from google.protobuf.message import DecodeError

from sapwood_common import errors, status
from sapwood_common.serving.gate import FOR_EVERYBODY
from sapwood_common.serving.push_call import PushCall
from sapwood_common.serving.rpc_telemetry import RpcTelemetry, RunningCall
from sapwood_common.serving.wire import count_fields, find_invalid_utf8
from sapwood_common.telemetry import logs as telemetry
from sapwood_common.tenants.api_keys import until_revoked

logger = logging.getLogger(__name__)

MOST_FIELDS = 32_768
"""Fields that a client's request may have: texts are one each, and so are all token ids together. They are counted only where
there are bytes enough for more."""
_LEAST_BYTES = 2
"""Bytes that a field takes at least."""
MOST_FIELDS_OF_SERVICES = 131_072
"""The most fields of a message between two services: it carries requests of many clients, or one client's JSON."""


class _Malformed:
    """Stands for a request whose bytes would not parse, or take too long, until the handler can answer it."""

    def __init__(self, problem: str, field: str | None = None) -> None:
        self.error = errors.InvalidArgumentError(problem, field=field)


class ServiceInterceptor:
    """Wraps every handler of a service.

    - A :class:`~sapwood_common.errors.SapwoodError` ends the call with its status and details; any other exception is
      logged with its traceback and ends the call INTERNAL without it.
    - A request that does not parse is INVALID_ARGUMENT and names the field, where grpcio would say INTERNAL.
    - The request id in the metadata becomes the current task's, for its log lines.
    - While draining, new calls are refused UNAVAILABLE; ``idle`` is set when no counted call is left.
    - A call ends when the API key that it came with is revoked.
    - Each call is measured, and works in the trace context that its metadata names.

    Args:
        telemetry: Measures the calls.
        uncounted: Full method names (``/sapwood.v1.Worker/WatchLoad``) that do not hold up draining.
        most_fields: Fields that a large request may have.
    """

    def __init__(
        self, telemetry: RpcTelemetry, uncounted: frozenset[str] = frozenset(), most_fields: int = MOST_FIELDS
    ) -> None:
        self._most_fields = most_fields
        self._telemetry = telemetry
        self._uncounted = uncounted
        self._running = 0
        self._draining = False
        self.idle = asyncio.Event()
        self.idle.set()

    def refuse_new(self) -> None:
        """Refuses new calls from now on; running ones continue."""
        self._draining = True

    def wrap(self, method: str, handler: Any) -> Any:
        """The handler (``grpc.RpcMethodHandler``) to use for a method."""
        if method.startswith(FOR_EVERYBODY):
            return handler
        deserializer = _safe(handler.request_deserializer, self._most_fields)
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                self._unary(method, handler.unary_unary), deserializer, handler.response_serializer
            )
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(
                self._stream(method, handler.unary_stream), deserializer, handler.response_serializer
            )
        if handler.stream_stream is not None:
            behavior = handler.stream_stream
            return grpc.stream_stream_rpc_method_handler(
                self._stream(method, lambda requests, context: behavior(_refuse_malformed(requests), context)),
                deserializer,
                handler.response_serializer,
            )
        return handler

    def _unary(self, method: str, behavior: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            running = self._begin(method, context)
            ended: BaseException | None = None
            try:
                self._check(request)
                with until_revoked(cast(PushCall, context).tenant):
                    return await behavior(request, context)
            except BaseException as error:
                ended = error
                if not isinstance(error, Exception):
                    raise
                await _abort(method, context, error)
            finally:
                self._end(method, running, ended)
                ended = None  # its traceback has this frame: they would keep the call until the collector comes

        return call

    def _stream(
        self, method: str, behavior: Callable[..., AsyncGenerator[Any] | Awaitable[None]]
    ) -> Callable[..., AsyncIterator[Any]]:
        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            running = self._begin(method, context)
            ended: BaseException | None = None
            try:
                self._check(request)
                answering = behavior(request, context)
                if isinstance(answering, Awaitable):  # the handler writes by itself
                    with until_revoked(cast(PushCall, context).tenant):
                        await answering
                    return
                async with aclosing(answering) as responses:
                    async for response in responses:
                        yield response
            except BaseException as error:
                ended = error
                if not isinstance(error, Exception):
                    raise
                await _abort(method, context, error)
            finally:
                self._end(method, running, ended)
                ended = None  # its traceback has this frame: they would keep the call until the collector comes

        return call

    def _begin(self, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> RunningCall:
        if method not in self._uncounted:
            self._running += 1
            self.idle.clear()
        metadata = context.invocation_metadata() or ()
        for key, value in metadata:
            if key == telemetry.REQUEST_ID_KEY and isinstance(value, str) and telemetry.is_valid_request_id(value):
                telemetry.request_id_var.set(value)
        return self._telemetry.begin(method, metadata)

    def _check(self, request: Any) -> None:
        if self._draining:
            raise errors.UnavailableError("this service is shutting down", retry_after=1.0)
        if isinstance(request, _Malformed):
            raise request.error

    def _end(self, method: str, running: RunningCall, error: BaseException | None) -> None:
        running.end(error)
        if method not in self._uncounted:
            self._running -= 1
            if self._running == 0:
                self.idle.set()


def _safe(deserializer: Callable[[bytes], Any], most: int) -> Callable[[bytes], Any]:
    message_class = getattr(deserializer, "__self__", None)  # FromString is bound to the message class
    descriptor = getattr(message_class, "DESCRIPTOR", None)

    def parse(raw: bytes) -> Any:
        many = descriptor is not None and len(raw) > _LEAST_BYTES * most and count_fields(raw, descriptor, most) > most
        if many:
            return _Malformed(f"the request has more than {most} fields")
        try:
            return deserializer(raw)
        except DecodeError:
            field = None if descriptor is None else find_invalid_utf8(raw, descriptor)
            if field is not None:
                return _Malformed(f"{field} is not valid UTF-8", field)
            return _Malformed("the request is not a valid protobuf message of its type")

    return parse


async def _refuse_malformed(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        if isinstance(request, _Malformed):
            raise request.error
        yield request


def as_told(method: str, error: Exception) -> errors.SapwoodError:
    """The error that a method's caller gets. The original is logged."""
    if isinstance(error, grpc.aio.AioRpcError):  # another service's answer, passed on
        error = status.from_rpc_error(error)
    if not isinstance(error, errors.SapwoodError):
        logger.error("%s failed", method, exc_info=error)
        error = errors.InternalError("internal error; the service's log has the details under this request id")
    logger.info("%s ends %s: %s", method, status.row_of(error).grpc.name, error.message)
    return error


async def _abort(method: str, context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    shown = as_told(method, error)
    errors.forget_frames(error)
    await context.abort(*status.rpc_status(shown))
    raise AssertionError("abort returned")
