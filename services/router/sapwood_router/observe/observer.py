"""What is measured and traced of a request on its way through the pipeline.

The pipeline calls a :class:`RequestWatch`; nothing here changes what it does.
"""

from __future__ import annotations

import time
from contextvars import Token
from types import TracebackType
from typing import TYPE_CHECKING

import msgspec

from sapwood_common.status import row_of
from sapwood_common.telemetry.logs import traceparent_var
from sapwood_common.telemetry.series import Histogram
from sapwood_common.telemetry.tracing import Span, Tracing
from sapwood_router.observe.metrics import RouterMetrics
from sapwood_router.observe.pair_parts import PairPart, PairParts
from sapwood_router.observe.request_log import RequestLog
from sapwood_router.observe.spans import answered, asked, operation_of, span_name

if TYPE_CHECKING:
    from sapwood_common.errors import SapwoodError
    from sapwood_router.request.context import RequestContext


class RequestObserver:
    """Metrics and spans of requests.

    Args:
        metrics: The router's.
        tracing: Where spans go.
        log: Writes a line for each request.
    """

    def __init__(self, metrics: RouterMetrics, tracing: Tracing, log: RequestLog) -> None:
        self.metrics = metrics
        self.tracing = tracing
        self.log = log

    def watch(self, context: RequestContext) -> RequestWatch:
        """A request came; to be called in the task that serves it."""
        return RequestWatch(self, context)


class Stage(msgspec.Struct):
    """A stage of the pipeline, timed: around a ``with`` body, or where it has none, from :meth:`begin` to :meth:`end`."""

    seconds: Histogram
    started: float = 0.0

    def begin(self) -> None:
        """It begins."""
        self.started = time.perf_counter()

    def end(self) -> None:
        """It is over."""
        self.seconds.observe(time.perf_counter() - self.started)

    def __enter__(self) -> None:
        self.started = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.seconds.observe(time.perf_counter() - self.started)


class TracedStage(Stage, kw_only=True):
    """A stage while tracing is on: what its body calls is traced as the stage's child."""

    tracing: Tracing
    traceparent: str | None
    name: str
    span: Span | None = None
    token: Token[str | None] | None = None

    def begin(self) -> None:
        super().begin()
        self.span = self.tracing.start(self.name, parent=self.traceparent)

    def end(self, error: str | None = None) -> None:
        assert self.span is not None
        self.span.end(error=error)
        super().end()

    def __enter__(self) -> None:
        self.begin()
        assert self.span is not None
        self.token = traceparent_var.set(self.span.traceparent)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self.token is not None
        traceparent_var.reset(self.token)
        self.end(None if error is None else str(error) or type(error).__name__)


class RequestWatch:
    """One request under observation.

    Attributes:
        traceparent: Names the request's span, which its stages, in whichever task they run, have as their parent.
    """

    def __init__(self, observer: RequestObserver, context: RequestContext) -> None:
        self._metrics = observer.metrics
        self._tracing = observer.tracing
        self._traced = observer.tracing.on
        self._context = context
        self._last = context.started
        self._closed = False
        self._responding = 0.0
        self._respond_span: Span | None = None
        self._inter_token: Histogram | None = None
        self._metrics.request_began()
        self._named = bool(context.model)
        self._span: Span = self._tracing.start(
            span_name(operation_of(context), context.model),
            parent=traceparent_var.get(),
            kind="client",
            attributes=asked(context) if self._traced else None,
        )
        self.traceparent = self._span.traceparent

    def stage(self, name: str) -> Stage:
        """A stage of the pipeline, to be entered once."""
        return self._timed(self._metrics.stages[name], name) if self._traced else Stage(self._metrics.stages[name])

    def pair_parts(self) -> PairParts:
        """The parts of a request that is handed from worker to worker; they may be begun and ended in any order."""

        def stage(part: PairPart) -> Stage:
            seconds = self._metrics.pair.at(part=part)
            return self._timed(seconds, part) if self._traced else Stage(seconds)

        return PairParts(stage)

    def _timed(self, seconds: Histogram, name: str) -> TracedStage:
        return TracedStage(seconds, tracing=self._tracing, traceparent=self.traceparent, name=name)

    def selected(self, reason: str) -> None:
        """A worker was chosen."""
        self._metrics.selections.at(reason=reason).inc()

    def retried(self, error: SapwoodError) -> None:
        """A worker failed the request, and another is tried."""
        self._metrics.retries.at(code=row_of(error).grpc.name).inc()

    def weighed(self, *, pair: bool) -> None:
        """It was weighed whether a pair of workers costs less than one alone."""
        self._metrics.weighed.at(choice="pair" if pair else "alone").inc()

    def handed_off(self) -> None:
        """The prompt is computed, and another worker is to generate."""
        self._metrics.handoffs.at().inc()

    def resumed(self) -> None:
        """The stream goes on, on another worker, after tokens had come."""
        self._metrics.stream_resumed()

    def delta(self, started: float, tokens: int) -> None:
        """The client gets a delta with so many tokens; respond began to make it at ``started``, by ``time.perf_counter``.

        That stage's time is that of all deltas; its span goes from the first to the end of the request.
        """
        now = time.perf_counter()
        context = self._context
        self._responding += now - started
        if self._last == context.started:
            model = context.model or "-"
            self._metrics.first_token.at(model=model).observe(now - context.started)
            self._inter_token = self._metrics.inter_token.at(model=model)
            if self._traced:
                self._respond_span = self._tracing.start("respond", parent=self.traceparent)
        elif tokens and self._inter_token is not None:
            self._inter_token.observe((now - self._last) / tokens)
        self._last = now

    def close(self) -> None:
        """The request ended; ``usage`` and ``error`` of its context say how. May be called again."""
        if self._closed:
            return
        self._closed = True
        self._metrics.request_ended()
        if self._responding:
            self._metrics.stages["respond"].observe(self._responding)
        if self._respond_span is not None:
            self._respond_span.end()
        context, metrics = self._context, self._metrics
        code = "CANCELLED" if context.usage is None else "OK"
        if context.error is not None:
            code = row_of(context.error).grpc.name
        model, tenant = "-", context.caller.tenant or "-"
        if context.worker != "-":  # a model that a worker serves: what clients made up is no label
            model = context.model or "-"
            generated, asked_tokens = context.token_counts
            prompt_tokens, cached_tokens, completion_tokens, tenant_tokens = metrics.of_tokens(model, tenant)
            prompt_tokens.inc(asked_tokens)
            cached_tokens.inc(context.cached_tokens)
            completion_tokens.inc(generated)
            tenant_tokens.inc(asked_tokens + max(generated, len(context.output_ids)))
            prompt_length, completion_length = metrics.of_lengths(model)
            prompt_length.observe(asked_tokens)
            completion_length.observe(generated)
        requests, seconds, tenant_requests = metrics.of_end(model, tenant, code)
        tenant_requests.inc()
        requests.inc()
        seconds.observe(time.perf_counter() - context.started)
        if self._traced:
            if not self._named and context.model is not None:
                self._span.rename(span_name(operation_of(context), context.model))
            for name, value in answered(context, code).items():
                self._span.set(name, value)
        self._span.end(error=None if code == "OK" else code if context.error is None else context.error.message)
