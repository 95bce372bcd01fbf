"""Runs the requests behind one HTTP request and sends their answer: one body, or events as they come."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from sapwood_net.pacing.heavy_work import A_FEW
from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.edges.http.sse import with_field
from sapwood_router.edges.openai.annotate import Annotator
from sapwood_router.edges.openai.sse import NULL, CompletionChunks
from sapwood_router.edges.openai.types import CompletionTokensDetails, PromptTokensDetails, UsageObject
from sapwood_router.edges.runs import Running
from sapwood_router.edges.whole import RESUMPTIONS_HEADER, collect, notice_headers, told_headers
from sapwood_router.flow.delivery import Delivery
from sapwood_router.flow.pipeline import Pipeline, Run
from sapwood_router.request.context import Delta, Finish, FinishReason, RequestContext, Usage
from sapwood_router.request.output import Output
from sapwood_router.request.output_stream import Relay


class Answer(msgspec.Struct):
    """A complete generation; ``mean_logprob`` is that of its tokens, if their probabilities were asked for."""

    index: int
    output: Output
    token_ids: list[int]
    finish: Finish
    logprobs: Any = None
    mean_logprob: float = 0.0


def finish_reason(finish: Finish, called: bool) -> str:
    """OpenAI's word for why a generation ended; ``called`` says whether it has tool calls."""
    return "tool_calls" if called and finish.reason is FinishReason.STOP else finish.reason.value


def usage_object(usages: Sequence[Usage], continuations: int = 1) -> UsageObject:
    """The usage of several requests together; a prompt counts once for all its ``continuations``."""
    prompt = cached = completion = accepted = rejected = reasoning = 0
    for usage in usages[::continuations]:
        prompt += usage.prompt_tokens
        cached += usage.cached_tokens
    for usage in usages:
        completion += usage.completion_tokens
        accepted += usage.accepted_prediction_tokens
        rejected += usage.rejected_prediction_tokens
        reasoning += usage.reasoning_tokens
    some = accepted or rejected or reasoning
    details = CompletionTokensDetails(accepted, rejected, reasoning) if some else msgspec.UNSET
    return UsageObject(prompt, completion, prompt + completion, PromptTokensDetails(cached), details)


async def send_answer(
    exchange: Exchange,
    pipeline: Pipeline,
    contexts: Sequence[RequestContext],
    annotator: Annotator,
    make_body: Callable[[list[Answer]], Awaitable[msgspec.Struct]],
    make_chunks: Callable[[], CompletionChunks] | None,
    continuations: int,
) -> None:
    """Runs the requests and sends their answer.

    Args:
        exchange: Where it goes.
        pipeline: Runs them.
        contexts: The requests.
        annotator: Annotates their deltas.
        make_body: Makes one body of all answers; headers then say what gRPC's trailing metadata does.
        make_chunks: Makes what writes events as text comes; None: there is to be one body.
        continuations: How many of the requests have one prompt.

    Raises:
        SapwoodError: One of the requests failed; the others are ended.
    """
    async with Running(exchange, pipeline, contexts) as runs:
        if make_chunks is None:
            answers: list[Answer] = []
            for whole in await collect(runs):
                if len(answers) % A_FEW == A_FEW - 1:
                    await pipeline.heavy.turn(contexts[0].caller.tenant, goes_on=True)
                answers.append(await _annotated(len(answers), whole, annotator))
            body = msgspec.json.encode(await make_body(answers))
            await exchange.send_body(200, body, told_headers(exchange.workers, contexts))
        else:
            stint = pipeline.heavy.stint(contexts[0].caller.tenant) if len(runs) > A_FEW else None
            client = _EventClient(exchange, contexts, runs, annotator, make_chunks, continuations)
            await Delivery(client, stint).carry(runs)


async def _annotated(index: int, whole: Delta, annotator: Annotator) -> Answer:
    likelihoods = whole.logprobs
    logprobs = await annotator.annotate(index, whole)
    assert whole.finish is not None, "each run ends with a finish or an error"
    mean = sum(found.logprob for found in likelihoods) / max(1, len(likelihoods))
    return Answer(index, whole.output, whole.token_ids, whole.finish, logprobs, mean)


class _EventClient:
    """Writes the output of a request's runs as server-sent events.

    The response starts with the first text, so an error before it has its own status. Deltas between the first and the last of a
    choice are sent in the callback that brings them. The first, the last and those that are annotated are sent by
    :meth:`drained`, because something has to be awaited. If a stream went on, on another worker, its last chunk says how often:
    the headers had left before.
    """

    def __init__(
        self,
        exchange: Exchange,
        contexts: Sequence[RequestContext],
        runs: Sequence[Run],
        annotator: Annotator,
        make_chunks: Callable[[], CompletionChunks],
        continuations: int,
    ) -> None:
        self._exchange = exchange
        self._contexts = contexts
        self._runs = runs
        self._annotator = annotator
        self._make_chunks = make_chunks
        self._continuations = continuations
        self._chunks: CompletionChunks | None = None
        self._opened: set[int] = set()
        self._called: set[int] = set()
        """Choices that have a tool call."""
        self._usages: dict[int, Usage] = {}
        self._sent = [0] * len(runs)
        """Tokens sent of each choice; counted only where every chunk tells the usage so far."""
        self._pending: tuple[int, Delta] | None = None
        """A choice and its delta that cannot be sent without awaiting something: :meth:`drained` sends it."""

    def writable(self) -> bool:
        """Whether no delta is pending, and the client reads."""
        return self._pending is None and self._exchange.writable()

    async def drained(self) -> None:
        """Sends the pending delta; if there is none, waits until the client has read enough."""
        if self._pending is None:
            await self._exchange.drained()
            return
        index, delta = self._pending
        note = await self._annotator.annotate(index, delta)
        logprobs = NULL if note is None else note
        if self._chunks is None:
            self._chunks = self._make_chunks()
            self._exchange.extra_headers = (*self._exchange.extra_headers, *notice_headers(self._contexts[0]))
        told = None if index in self._opened else await self._annotator.prompt_logprobs(index)
        events = self._events(self._chunks, index, delta, logprobs, told or b"")
        last = len(self._usages) == len(self._runs)
        if last:
            if resumptions := sum(run.resumptions for run in self._runs):
                events = with_field(events, RESUMPTIONS_HEADER, resumptions)
            ordered = [self._usages[number] for number in range(len(self._runs))]
            events += self._chunks.closing(usage_object(ordered, self._continuations))
        if events:
            await self._exchange.send_events(events, last=last)
        self._pending = None

    def write(self, index: int, delta: Delta) -> bool:
        if self._chunks is None or index not in self._opened or delta.finish is not None or not self._annotator.silent:
            self._pending = index, delta
            return False
        if events := self._events(self._chunks, index, delta, NULL):
            self._exchange.write_events(events)
        return True

    def token_writer(self, index: int) -> Relay | None:
        """Sends single token ids of the only choice, where chunks tell them."""
        if len(self._runs) > 1 or self._chunks is None or not self._annotator.silent:
            return None
        if self._chunks.tells_usage_so_far:
            return None
        around = self._chunks.around_token()
        return None if around is None else self._exchange.number_writer(*around)

    def _events(
        self, chunks: CompletionChunks, index: int, delta: Delta, logprobs: bytes, prompt_logprobs: bytes = b""
    ) -> bytes:
        events = b""
        if index not in self._opened:
            self._opened.add(index)
            events = chunks.opening(index, prompt_logprobs)
        if delta.output.tool_calls:
            self._called.add(index)
        if delta.finish is None:
            events += chunks.output(index, delta, logprobs)
        else:
            self._usages[index] = delta.finish.usage
            events += chunks.finish(index, delta, finish_reason(delta.finish, index in self._called), logprobs)
        if chunks.tells_usage_so_far:
            self._sent[index] += len(delta.token_ids)
            return chunks.with_usage(events, self._usage_so_far())
        return events

    def _usage_so_far(self) -> UsageObject:
        usages = [
            Usage(len(context.token_ids), tokens, context.cached_tokens)
            for context, tokens in zip(self._contexts, self._sent, strict=True)
        ]
        return usage_object(usages, self._continuations)
