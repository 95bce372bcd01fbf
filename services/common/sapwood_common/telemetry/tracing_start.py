"""Turns tracing on, or leaves it off. OpenTelemetry is imported only where it is on."""

from __future__ import annotations

from sapwood_common.telemetry.tracing import Tracing


def start_tracing(service: str, endpoint: str | None, ratio: float) -> Tracing:
    """Tracing to an OTLP/gRPC collector, or none.

    Args:
        service: ``service.name`` of the spans.
        endpoint: ``host:port`` or URL of the collector; None, or nothing, is off.
        ratio: Share of traces that are kept, 0 to 1, of those that begin here; others follow their parent's decision.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    if not endpoint:
        return Tracing()
    from sapwood_common.telemetry.tracing_otlp import OtlpTracing

    return OtlpTracing(service, endpoint, ratio)
