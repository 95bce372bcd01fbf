"""Measures every gRPC call that a service answers: count, duration, how many run, and a server span."""

from __future__ import annotations

import time
from collections.abc import Iterable

import grpc

from sapwood_common.errors import SapwoodError
from sapwood_common.status import row_of
from sapwood_common.telemetry.logs import TRACEPARENT_KEY, is_valid_traceparent, traceparent_var
from sapwood_common.telemetry.metrics import AtMost, MetricSet, OneOf
from sapwood_common.telemetry.tracing import Span, Tracing

CODES = OneOf(*(code.name for code in grpc.StatusCode), shown="the gRPC statuses")
_MOST_METHODS = 64


class RpcTelemetry:
    """Makes the metrics of calls and watches each.

    Args:
        metrics: Where they are made.
        tracing: Where spans go. A call without a trace context gets one only if its method is among ``roots``.
        roots: Full method names (``/sapwood.v1.Router/Generate``) at which traces begin.
    """

    def __init__(self, metrics: MetricSet, tracing: Tracing, roots: frozenset[str] = frozenset()) -> None:
        method = AtMost(_MOST_METHODS)  # methods that do not exist never get here
        self._calls = metrics.counter("sapwood_rpc_calls_total", "gRPC calls answered.", method=method, code=CODES)
        self._seconds = metrics.histogram("sapwood_rpc_seconds", "Duration of gRPC calls.", method=method)
        self._running = metrics.gauge("sapwood_rpc_running", "gRPC calls being answered.", method=method)
        self._tracing = tracing
        self._roots = roots

    def begin(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> RunningCall:
        """A call begins in the current task, which from now on works in its trace context."""
        parent = next(
            (
                value
                for key, value in metadata
                if key == TRACEPARENT_KEY and isinstance(value, str) and is_valid_traceparent(value)
            ),
            None,
        )
        span: Span | None = None
        if parent is not None or (self._tracing.on and method in self._roots):
            service, _, name = method.removeprefix("/").rpartition("/")
            span = self._tracing.start(
                method.removeprefix("/"),
                parent=parent,
                kind="server",
                attributes={"rpc.system": "grpc", "rpc.service": service, "rpc.method": name},
            )
            traceparent_var.set(span.traceparent)
        self._running.at(method=method).inc()
        return RunningCall(self, method, span)

    def refused(self, method: str, error: SapwoodError) -> None:
        """A call was refused before it began."""
        self._calls.at(method=method, code=row_of(error).grpc.name).inc()

    def ended(self, method: str, code: str, seconds: float) -> None:
        """A call ended; for :class:`RunningCall`."""
        self._running.at(method=method).dec()
        self._calls.at(method=method, code=code).inc()
        self._seconds.at(method=method).observe(seconds)


class RunningCall:
    """A call under way."""

    def __init__(self, owner: RpcTelemetry, method: str, span: Span | None) -> None:
        self._owner = owner
        self._method = method
        self._span = span
        self._started = time.perf_counter()

    def end(self, error: BaseException | None) -> None:
        """The call ended: well (None), with an error, or because its client left (GeneratorExit, CancelledError)."""
        if error is None:
            code, message = grpc.StatusCode.OK, None
        elif isinstance(error, SapwoodError):
            code, message = row_of(error).grpc, error.message
        elif isinstance(error, grpc.aio.AioRpcError):
            code, message = error.code(), error.details() or ""
        elif isinstance(error, Exception):
            code, message = grpc.StatusCode.INTERNAL, type(error).__name__
        else:
            code, message = grpc.StatusCode.CANCELLED, "the client left"
        self._owner.ended(self._method, code.name, time.perf_counter() - self._started)
        if self._span is not None:
            self._span.set("rpc.grpc.status_code", code.value[0])
            if code is not grpc.StatusCode.OK:
                self._span.set("error.type", code.name)
            self._span.end(error=message)
