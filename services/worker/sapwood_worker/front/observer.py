"""What the front measures and traces of each generation: time in the queue, to the first token, and to the end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from sapwood_common.telemetry.tracing import Span, Tracing
from sapwood_worker.front.metrics import WorkerMetrics
from sapwood_worker.records.output import RequestOutput
from sapwood_worker.records.step_time import LoadTime, StepTime


@dataclass(slots=True)
class _Times:
    """When things happened to one generation, in seconds on ``time.monotonic``'s clock; ``last``: its latest output."""

    span: Span | None
    arrived: float
    started: float | None = None
    first: float | None = None
    last: RequestOutput | None = None
    loads: list[LoadTime] = field(default_factory=list)


class EngineObserver:
    """Counts, times and traces what the engine reports, on the event loop.

    Args:
        metrics: The worker's.
        tracing: Where spans go; only requests that name a trace context have any.
    """

    def __init__(self, metrics: WorkerMetrics, tracing: Tracing | None = None) -> None:
        self._metrics = metrics
        self._tracing = tracing or Tracing()
        self._running: dict[int, _Times] = {}
        self._epoch_ns = time.time_ns() - time.monotonic_ns()

    def submitted(self, serial: int, request_id: str, traceparent: str | None) -> None:
        """A generation was handed to the scheduler."""
        span = None
        if self._tracing.on and traceparent is not None:
            span = self._tracing.start(
                "worker generate", parent=traceparent, kind="server", attributes={"sapwood.request_id": request_id}
            )
        self._running[serial] = _Times(span, time.monotonic())

    def steps(self, steps: Sequence[StepTime]) -> None:
        """Steps ended."""
        for step in steps:
            self._metrics.step(step)
            for serial in step.started:
                if (times := self._running.get(serial)) is not None:
                    times.started = step.at
                    self._metrics.queue.at().observe(max(0.0, step.at - times.arrived))
            for load in step.loads:
                if (times := self._running.get(load.serial)) is not None:
                    times.loads.append(load)

    def outputs(self, outputs: Sequence[RequestOutput]) -> None:
        """Generations got outputs."""
        for output in outputs:
            if (times := self._running.get(output.serial)) is None:
                continue
            times.last = output
            if times.first is None and output.token_ids:
                times.first = time.monotonic()
                self._metrics.first_token.at().observe(times.first - times.arrived)

    def closed(self, serial: int, *, active: bool) -> None:
        """A generation ended. ``active``: the scheduler was not done with it, so it was aborted."""
        times = self._running.pop(serial)
        last = times.last
        finish = last.finish_reason if last is not None else None
        outcome = "aborted" if active else finish if finish in ("stop", "length", "handoff") else "failed"
        self._metrics.requests.at(outcome=outcome).inc()
        if times.span is not None:
            self._end_span(times, times.span, outcome)

    def _end_span(self, times: _Times, span: Span, outcome: str) -> None:
        now = time.monotonic()
        bounds = [("queue", times.arrived, times.started), ("prefill", times.started, times.first)]
        bounds.append(("decode", times.first, now))
        for name, begin, end in bounds:
            if begin is not None:
                part = self._tracing.start(name, parent=span.traceparent, at_ns=self._unix_ns(begin))
                part.end(at_ns=self._unix_ns(now if end is None else end))
        for load in times.loads:
            attributes = {"sapwood.cache.tier": load.tier, "sapwood.cache.pages": load.pages}
            part = self._tracing.start(
                "cache load", parent=span.traceparent, attributes=attributes, at_ns=self._unix_ns(load.began)
            )
            part.end(at_ns=self._unix_ns(load.ended))
        if times.last is not None:
            span.set("gen_ai.usage.input_tokens", times.last.prompt_tokens)
            span.set("gen_ai.usage.output_tokens", times.last.completion_tokens)
            span.set("gen_ai.usage.cache_read.input_tokens", times.last.cached_tokens)
            span.set("sapwood.drafted_tokens", times.last.drafted_tokens)
            span.set("sapwood.accepted_tokens", times.last.accepted_tokens)
        span.set("sapwood.outcome", outcome)
        if outcome == "failed":
            span.set("error.type", outcome)
        span.end(error=outcome if outcome == "failed" else None)

    def _unix_ns(self, seconds: float) -> int:
        return self._epoch_ns + round(seconds * 1e9)
