"""Traces: the part of OpenTelemetry that services use; by itself it does nothing, which is tracing that is off.

The context travels as the W3C ``traceparent`` header, in gRPC metadata and HTTP alike, and inside a process as
:data:`sapwood_common.telemetry.logs.traceparent_var`. A service that does not trace hands the header on, so that a trace stays
connected across it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

from sapwood_common.errors import SapwoodError
from sapwood_common.status import row_of
from sapwood_common.telemetry.logs import traceparent_var

SpanKind = Literal["internal", "server", "client"]
Attribute = str | int | float | bool | list[str]


class Span:
    """A span of a trace: a piece of work that takes time. This one is kept nowhere.

    Args:
        traceparent: What its children name as their parent; None if there is nothing to name.
    """

    def __init__(self, traceparent: str | None) -> None:
        self.traceparent = traceparent

    def set(self, name: str, value: Attribute) -> None:
        """Adds an attribute."""

    def rename(self, name: str) -> None:
        """Changes its name, for when more is known than at the start."""

    def end(self, *, error: str | None = None, at_ns: int | None = None) -> None:
        """Ends it, as failed if ``error`` says what went wrong. ``at_ns``: Unix time in ns, now unless given."""


_NO_PARENT = Span(None)


class Tracing:
    """Makes spans. This one is off: it hands the caller's context on and keeps nothing.

    Attributes:
        on: Whether spans are sent anywhere; if not, their attributes need not be computed.
    """

    on = False

    def start(
        self,
        name: str,
        *,
        parent: str | None,
        kind: SpanKind = "internal",
        attributes: Mapping[str, Attribute] | None = None,
        at_ns: int | None = None,
    ) -> Span:
        """Begins a span. The caller ends it.

        Args:
            name: Its name; few different ones.
            parent: The traceparent of its parent; None or a malformed one begins a new trace.
            kind: As in OpenTelemetry.
            attributes: Its first attributes.
            at_ns: Unix time in ns; now unless given.
        """
        return _NO_PARENT if parent is None else Span(parent)

    def close(self) -> None:
        """Sends the spans that have not been sent, which may take seconds."""


def error_type(error: BaseException) -> str:
    """What OpenTelemetry calls ``error.type``: the gRPC status of an error of ours, else the exception's name."""
    return row_of(error).grpc.name if isinstance(error, SapwoodError) else type(error).__name__


@contextmanager
def child_span(
    tracing: Tracing, name: str, kind: SpanKind = "internal", attributes: Mapping[str, Attribute] | None = None
) -> Iterator[Span]:
    """A span around the body of a ``with``, in the current task; spans that begin inside have it as their parent."""
    span = tracing.start(name, parent=traceparent_var.get(), kind=kind, attributes=attributes)
    token = traceparent_var.set(span.traceparent)
    try:
        yield span
    except BaseException as error:
        span.set("error.type", error_type(error))
        span.end(error=str(error) or type(error).__name__)
        raise
    else:
        span.end()
    finally:
        traceparent_var.reset(token)
