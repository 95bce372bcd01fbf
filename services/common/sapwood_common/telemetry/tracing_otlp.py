"""Tracing through the OpenTelemetry SDK, sent as OTLP over gRPC. Imported only where tracing is on."""

from __future__ import annotations

from collections.abc import Mapping

from sapwood_common.errors import ConfigError
from sapwood_common.telemetry.shown_text import shown
from sapwood_common.telemetry.tracing import Attribute, Span, SpanKind, Tracing

try:
    from opentelemetry import trace
    from opentelemetry.context import Context
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as missing:
    raise ConfigError("--trace-endpoint needs OpenTelemetry: pip install 'sapwood[otel]'") from missing

_KINDS: dict[SpanKind, trace.SpanKind] = {
    "internal": trace.SpanKind.INTERNAL,
    "server": trace.SpanKind.SERVER,
    "client": trace.SpanKind.CLIENT,
}
_EXPORT_INTERVAL_MS = 1_000
_MOST_OF_NAME, _MOST_OF_VALUE, _MOST_IN_LIST = 256, 1024, 64


def _attribute(value: Attribute) -> Attribute:
    """An attribute whose text is fit to be shown."""
    if isinstance(value, str):
        return shown(value, _MOST_OF_VALUE)
    return [shown(each, _MOST_OF_VALUE) for each in value[:_MOST_IN_LIST]] if isinstance(value, list) else value


class _OtlpSpan(Span):
    def __init__(self, span: trace.Span) -> None:
        context = span.get_span_context()
        super().__init__(f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}")
        self._span = span

    def set(self, name: str, value: Attribute) -> None:
        self._span.set_attribute(name, _attribute(value))

    def rename(self, name: str) -> None:
        self._span.update_name(shown(name, _MOST_OF_NAME))

    def end(self, *, error: str | None = None, at_ns: int | None = None) -> None:
        if error is not None:
            self._span.set_status(trace.StatusCode.ERROR, shown(error, _MOST_OF_VALUE))
        self._span.end(at_ns)


class OtlpTracing(Tracing):
    """Sends spans over OTLP. They wait in a bounded queue and are dropped beyond it."""

    on = True

    def __init__(self, service: str, endpoint: str, ratio: float) -> None:
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": service}),
            sampler=ParentBased(TraceIdRatioBased(ratio)),
            shutdown_on_exit=False,
        )
        exporter = OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"))
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=_EXPORT_INTERVAL_MS))
        self._tracer = self._provider.get_tracer("sapwood")
        self._propagator = TraceContextTextMapPropagator()

    def start(
        self,
        name: str,
        *,
        parent: str | None,
        kind: SpanKind = "internal",
        attributes: Mapping[str, Attribute] | None = None,
        at_ns: int | None = None,
    ) -> Span:
        context = self._propagator.extract({"traceparent": parent} if parent else {}, Context())
        own = {each: _attribute(value) for each, value in (attributes or {}).items()}
        return _OtlpSpan(
            self._tracer.start_span(
                shown(name, _MOST_OF_NAME), context, kind=_KINDS[kind], attributes=own, start_time=at_ns
            )
        )

    def close(self) -> None:
        self._provider.shutdown()
