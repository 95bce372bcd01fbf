"""What is measured, traced and logged of a request on its way. Spans are those of OpenTelemetry's conventions for generative AI:
the router is the client of a model that a worker runs.

The request calls a :class:`RequestWatch`; nothing here changes what it does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextvars import Token
from types import TracebackType
from typing import Any, Literal

import grpc
import msgspec

from sapwood_common.contract.sampling import AS_MANY_AS_FIT, SamplingParams
from sapwood_common.errors import SapwoodError
from sapwood_common.status import row_of
from sapwood_common.telemetry.logs import traceparent_var
from sapwood_common.telemetry.series import Histogram
from sapwood_common.telemetry.shown_text import LongText
from sapwood_common.telemetry.tracing import Attribute, Span, Tracing
from sapwood_router.observe.history import History
from sapwood_router.observe.metrics import RouterMetrics
from sapwood_router.observe.timelines import Noted, Timeline, Timelines, came_at
from sapwood_router.request.context import ChatPrompt, RequestContext, TextPrompt, TokenPrompt
from sapwood_router.request.embed_request import Embeddings, EmbedRequest
from sapwood_router.request.output import Output

_SIGN = 1 << 63
"""Turns an unsigned 64-bit seed into the signed number of the same bits, which is what attributes can hold."""

PROVIDER = "sapwood"


def operation_of(context: RequestContext) -> str:
    """``gen_ai.operation.name`` of a generation."""
    return "chat" if isinstance(context.prompt, ChatPrompt) else "text_completion"


def span_name(operation: str, model: str | None) -> str:
    """The name of an operation's span; None or empty: its model is not known yet."""
    return operation if not model else f"{operation} {model}"


def asked(context: RequestContext) -> dict[str, Attribute]:
    """The attributes of a request; none has the prompt's text."""
    sampling = context.sampling
    given: dict[str, Attribute | None] = {
        "gen_ai.operation.name": operation_of(context),
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": context.model,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k or None,
        "gen_ai.request.max_tokens": None if sampling.max_tokens == AS_MANY_AS_FIT else sampling.max_tokens,
        "gen_ai.request.seed": (sampling.seed ^ _SIGN) - _SIGN,
        "gen_ai.request.stop_sequences": list(context.output.stop) or None,
        "sapwood.request_id": context.request_id,
    }
    return {name: value for name, value in given.items() if value is not None}


def answered(context: RequestContext, code: str) -> dict[str, Attribute]:
    """The attributes of a generation's end. ``code``: the name of its gRPC status."""
    generated, asked_tokens = context.token_counts
    attributes: dict[str, Attribute] = {
        "gen_ai.response.model": context.model or "-",
        "gen_ai.usage.input_tokens": asked_tokens,
        "gen_ai.usage.output_tokens": max(generated, len(context.output_ids)),
        "gen_ai.usage.cache_read.input_tokens": context.cached_tokens,
        "sapwood.worker": context.worker,
        "sapwood.selection_reason": context.reason,
        "sapwood.status": code,
        "sapwood.resumptions": context.resumptions,
        **({"sapwood.objective": context.objective} if context.objective else {}),
        "sapwood.accepted_tokens": context.accepted_prediction_tokens,
        "sapwood.drafted_tokens": context.accepted_prediction_tokens + context.rejected_prediction_tokens,
    }
    if context.worker_finish is not None:
        attributes["gen_ai.response.finish_reasons"] = [context.worker_finish.value]
    if code != "OK":
        attributes["error.type"] = code
    return attributes


EMBEDDINGS = "embeddings"
CLASSIFICATION = "classification"


def asked_to_embed(request: EmbedRequest) -> dict[str, Attribute]:
    """The attributes of an embedding request: how much is to be embedded, not what."""
    given: dict[str, Attribute | None] = {
        "gen_ai.operation.name": CLASSIFICATION if request.classifies else EMBEDDINGS,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": request.model,
        "gen_ai.embeddings.dimension.count": request.dimensions,
        "sapwood.request_id": request.request_id,
        "sapwood.inputs": len(request.inputs),
    }
    return {name: value for name, value in given.items() if value is not None}


def embedded(found: Embeddings) -> dict[str, Attribute]:
    """The attributes of an embedding request's answer."""
    return {
        "gen_ai.response.model": found.model,
        "gen_ai.usage.input_tokens": found.prompt_tokens,
        "gen_ai.embeddings.dimension.count": len(found.vectors[0]) if found.vectors else 0,
    }


logger = logging.getLogger(__name__)

Detail = Literal["off", "line", "parameters", "content"]
_LONGEST = 2048
"""Characters that are shown of a prompt and of an answer."""


class RequestLog:
    """Writes a line when a request ends.

    Args:
        detail: ``off``: none. ``line``: ids, counts, times and how it ended. ``parameters``: also how tokens are chosen and
            what else was asked, but nothing that anybody said. ``content``: also the prompt and the answer.
    """

    def __init__(self, detail: Detail = "line") -> None:
        self._detail = detail

    @property
    def shows_answers(self) -> bool:
        """Whether :meth:`write` has to get what was answered."""
        return self._detail == "content"

    def write(self, context: RequestContext, said: Sequence[Output]) -> None:
        """The request has ended; ``said`` is its answer, if that is to be shown."""
        if self._detail == "off" or not logger.isEnabledFor(logging.INFO):
            return
        now = time.perf_counter()
        generated, asked = context.token_counts
        if context.error is not None:
            status = row_of(context.error).grpc
        else:
            status = grpc.StatusCode.CANCELLED if context.usage is None else grpc.StatusCode.OK
        ttft = "-" if context.first_token is None else f"{(context.first_token - context.started) * 1000:.1f}ms"
        logger.info(
            "request=%s model=%s worker=%s reason=%s prompt=%d cached=%d completion=%d status=%s duration=%.1fms ttft=%s%s%s%s%s",
            context.request_id,
            context.model or "-",
            context.worker,
            context.reason,
            asked,
            context.cached_tokens,
            generated,
            status.name,
            (now - context.started) * 1000,
            ttft,
            f" resumptions={context.resumptions}" if context.resumptions else "",
            f" objective={context.objective}" if context.objective else "",
            "" if context.error is None else f" error={context.error.message!r}",
            LongText(self._details(context, said)),
        )

    def _details(self, context: RequestContext, said: Sequence[Output]) -> str:
        if self._detail not in ("parameters", "content"):
            return ""
        shown = f" parameters={_json(_parameters(context))}"
        if not self.shows_answers:
            return shown
        answer = {
            "reasoning": "".join(output.reasoning for output in said),
            "text": "".join(output.text for output in said),
            "tool_calls": "".join(f"{call.name}{call.arguments}" for output in said for call in output.tool_calls),
        }
        fields = {name: text[:_LONGEST] for name, text in answer.items() if text}
        if not context.detokenize:
            fields["token_ids"] = str(context.output_ids.tolist())[:_LONGEST]
        return f"{shown} prompt_content={_json(_prompt(context))} answer={_json(fields)}"


def _parameters(context: RequestContext) -> dict[str, Any]:
    """What was asked that is not said to the model, defaults left out."""
    sampling: dict[str, Any] = msgspec.to_builtins(context.sampling, str_keys=True)
    if context.sampling.max_tokens == SamplingParams().max_tokens:
        sampling.pop("max_tokens", None)
    asked: dict[str, Any] = {
        "sampling": sampling,
        "stop": len(context.output.stop),
        "grammar": "" if context.grammar is None else context.grammar.kind,
        "tool_required": context.tool_choice.required,
        "whole": context.whole,
        "token_ids_only": not context.detokenize,
        "tenant": context.caller.tenant,
        "priority": context.caller.priority,
    }
    return {name: value for name, value in asked.items() if value}


def _prompt(context: RequestContext) -> str:
    prompt = context.prompt
    if isinstance(prompt, TextPrompt):
        return prompt.text[:_LONGEST]
    given = prompt.token_ids if isinstance(prompt, TokenPrompt) else prompt.turns
    return _json(msgspec.to_builtins(given))[:_LONGEST]


def _json(value: Any) -> str:
    """The text on one line, whatever it holds."""
    return msgspec.json.encode(value).decode()


class RequestObserver:
    """Metrics, spans and log lines of requests.

    Args:
        metrics: The router's.
        tracing: Where spans go.
        log: Writes a line for each request.
        timelines, history: What the page shows of requests.
    """

    def __init__(
        self, metrics: RouterMetrics, tracing: Tracing, log: RequestLog, timelines: Timelines, history: History
    ) -> None:
        self.metrics = metrics
        self.tracing = tracing
        self.log = log
        self.timelines = timelines
        self.history = history

    def watch(self, context: RequestContext) -> RequestWatch:
        """A request came; to be called in the task that serves it."""
        return RequestWatch(self, context)


PairPart = Literal["prefill", "transfer", "decode"]
"""A part of a request that is handed from worker to worker."""


class Stage(msgspec.Struct):
    """A stage of a request, timed around a ``with`` body; what the body calls is traced as its child."""

    seconds: Histogram
    tracing: Tracing
    traceparent: str | None
    name: str
    watch: RequestWatch
    started: float = 0.0
    span: Span | None = None
    token: Token[str | None] | None = None

    def __enter__(self) -> None:
        self.started = time.perf_counter()
        if self.tracing.on:
            self.span = self.tracing.start(self.name, parent=self.traceparent)
            self.token = traceparent_var.set(self.span.traceparent)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.span is not None and self.token is not None:
            traceparent_var.reset(self.token)
            self.span.end(error=None if error is None else str(error) or type(error).__name__)
        seconds = time.perf_counter() - self.started
        self.seconds.observe(seconds)
        self.watch.noted.add(self.name, self.watch.worker, self.started, seconds)


class RequestWatch:
    """One request under observation: what happens to it becomes metrics, spans and a line of the log.

    Attributes:
        traceparent: Names the request's span, which its stages, in whichever task they run, have as their parent.
    """

    def __init__(self, observer: RequestObserver, context: RequestContext) -> None:
        self._log = observer.log
        self._metrics = observer.metrics
        self._tracing = observer.tracing
        self._traced = observer.tracing.on
        self._context = context
        self._timelines = observer.timelines
        self._history = observer.history
        self.noted = Noted(context.started)
        self._said: list[Output] | None = [] if observer.log.shows_answers else None
        self._last = 0.0
        """When the last delta came."""
        self._closed = False
        self._responding = 0.0
        self._respond_span: Span | None = None
        self._inter_token: Histogram | None = None
        self._under_way: dict[str, tuple[float, Span | None]] = {}
        """Stages that have begun in one callback and end in another: when, and their spans."""
        self._part: PairPart | None = None
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
        """A stage, to be entered once."""
        return Stage(self._metrics.stages[name], self._tracing, self.traceparent, name, self)

    @property
    def worker(self) -> str:
        """The worker that the request is at."""
        return self._context.worker

    def begin(self, name: str) -> None:
        """A stage begins that another callback ends."""
        span = self._tracing.start(name, parent=self.traceparent) if self._traced else None
        self._under_way[name] = time.perf_counter(), span

    def end(self, name: str) -> None:
        """Such a stage is over, if it is under way."""
        began = self._under_way.pop(name, None)
        if began is None:
            return
        started, span = began
        if span is not None:
            span.end()
        seconds = self._metrics.stages.get(name) or self._metrics.pair.at(part=name)
        took = time.perf_counter() - started
        seconds.observe(took)
        self.noted.add(name, self._context.worker, started, took)

    def part(self, part: PairPart | None) -> None:
        """A part of a request that is handed from worker to worker begins, and the one before is over; None: none begins."""
        if self._part is not None:
            self.end(self._part)
        self._part = part
        if part is not None:
            self.begin(part)

    def selected(self, reason: str) -> None:
        """A worker was chosen."""
        self._metrics.selections.at(reason=reason).inc()

    def pursued(self, outcome: str) -> None:
        """A request with an objective ended: ``met``, ``missed`` or ``shed``."""
        caller = self._context.caller
        self._metrics.objectives.at(priority=str(caller.priority), outcome=outcome).inc()

    def made_way(self, how: str) -> None:
        """It was ``held`` or ``preempted``, so that objectives of higher classes are met."""
        self._metrics.made_way.at(priority=str(self._context.caller.priority), how=how).inc()

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
        """The stream continues, on another worker, after tokens had come."""
        self._metrics.stream_resumed()

    def delta(self, started: float, tokens: int, output: Output | None = None) -> None:
        """The client gets a delta with this many tokens; respond began to make it at ``started``, by ``time.perf_counter``.

        That stage's time is that of all deltas; its span goes from the first to the end of the request.
        """
        now = time.perf_counter()
        self._responding += now - started
        if self._inter_token is None:
            context = self._context
            model = context.model or "-"
            self._metrics.first_token.at(model=model).observe(now - context.started)
            self._inter_token = self._metrics.inter_token.at(model=model)
            if self._traced:
                self._respond_span = self._tracing.start("respond", parent=self.traceparent)
        elif tokens:
            self._inter_token.observe((now - self._last) / tokens)
        self._last = now
        if self._said is not None and output is not None and len(self._said) < _LONGEST:
            self._said.append(output)

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
        self._show(code)
        self._span.end(error=None if code == "OK" else code if context.error is None else context.error.message)
        self._log.write(context, self._said or ())

    def _show(self, code: str) -> None:
        """Hands the request over to what the page shows."""
        context = self._context
        generated, asked_tokens = context.token_counts
        tokens = max(generated, len(context.output_ids))
        now = time.perf_counter()
        first = None if context.first_token is None else context.first_token - context.started
        if first is not None and context.worker != "-":
            each = (self._last - context.started - first) / (tokens - 1) if tokens > 1 and self._last else None
            self._history.ended(context.worker, first, each)
        trace = (self.traceparent or "").split("-")
        self._timelines.add(
            Timeline(
                context.request_id,
                trace[1] if self._traced and len(trace) > 1 else "",
                context.model or "-",
                context.worker,
                context.reason,
                code,
                came_at(context.started),
                now - context.started,
                first,
                asked_tokens,
                context.cached_tokens,
                tokens,
                context.resumptions,
                self.noted.stages,
                context.caller.tenant or "",
            )
        )
