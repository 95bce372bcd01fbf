"""Runs the requests behind one HTTP request and sends their answer: one body, or events as they come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec

from sapwood_router.context import Delta, Finish, FinishReason, RequestContext, Usage
from sapwood_router.openai.annotate import Annotator
from sapwood_router.openai.exchange import Exchange
from sapwood_router.openai.sse import NULL, CompletionChunks, with_field
from sapwood_router.openai.types import PromptTokensDetails, UsageObject
from sapwood_router.output import Output, OutputBuffer
from sapwood_router.pipeline.merge import merged
from sapwood_router.pipeline.pipeline import Run

_WORKER_HEADER, _RESUMPTIONS_HEADER = b"x-sapwood-worker", b"x-sapwood-resumptions"


class Answer(msgspec.Struct):
    """A complete generation."""

    output: Output
    token_ids: list[int]
    finish: Finish
    logprobs: Any = None


def finish_reason(finish: Finish, called: bool) -> str:
    """OpenAI's word for why a generation ended; ``called`` says whether it has tool calls."""
    return "tool_calls" if called and finish.reason is FinishReason.STOP else finish.reason.value


def usage_object(usages: Sequence[Usage], continuations: int = 1) -> UsageObject:
    """The usage of several requests together; a prompt counts once for all its ``continuations``."""
    prompt = sum(usage.prompt_tokens for usage in usages[::continuations])
    completion = sum(usage.completion_tokens for usage in usages)
    cached = sum(usage.cached_tokens for usage in usages[::continuations])
    return UsageObject(prompt, completion, prompt + completion, PromptTokensDetails(cached))


async def send_whole(
    exchange: Exchange,
    contexts: Sequence[RequestContext],
    runs: Sequence[Run],
    annotator: Annotator,
    make_body: Callable[[list[Answer]], msgspec.Struct],
) -> None:
    """Waits for all answers and sends them as one body; headers say what gRPC's trailing metadata does.

    Raises:
        SapwoodError: One of the requests failed; the others are ended.
    """
    outputs = [OutputBuffer() for _ in runs]
    wholes = [Delta(Output(), [], logprobs=[]) for _ in runs]
    async with aclosing(merged(runs)) as deltas:
        async for index, delta in deltas:
            outputs[index].add(delta.output)
            whole = wholes[index]
            whole.token_ids += delta.token_ids
            whole.text_tokens += delta.text_tokens
            whole.logprobs = [*whole.logprobs, *delta.logprobs] if delta.logprobs else whole.logprobs
            whole.finish = delta.finish
    answers = []
    for index, (output, whole) in enumerate(zip(outputs, wholes, strict=True)):
        whole.output = output.take()
        logprobs = await annotator.annotate(index, whole)
        assert whole.finish is not None, "each run ends with a finish or an error"
        answers.append(Answer(whole.output, whole.token_ids, whole.finish, logprobs))
    resumptions = sum(context.resumptions for context in contexts)
    headers = ((_WORKER_HEADER, contexts[0].worker.encode()), (_RESUMPTIONS_HEADER, b"%d" % resumptions))
    await exchange.send_body(200, msgspec.json.encode(make_body(answers)), headers)


async def send_stream(
    exchange: Exchange,
    runs: Sequence[Run],
    annotator: Annotator,
    make_chunks: Callable[[], CompletionChunks],
    continuations: int,
) -> None:
    """Sends events as text comes. The response starts with the first text, so an error before it has its own status.

    With one choice, what comes between first and last is sent by whoever brings it, while the client reads fast enough. Where
    a stream went on, on another worker, its last chunk says how often: when the headers left nobody knew.

    Raises:
        SapwoodError: One of the requests failed; the others are ended.
    """
    chunks: CompletionChunks | None = None
    opened: set[int] = set()
    called: set[int] = set()
    usages: dict[int, Usage] = {}
    diverts = len(runs) == 1 and annotator.silent
    async with aclosing(merged(runs)) as deltas:
        async for index, delta in deltas:
            note = await annotator.annotate(index, delta)
            logprobs = NULL if note is None else msgspec.json.encode(note)
            chunks = chunks or make_chunks()
            events = b""
            if index not in opened:
                opened.add(index)
                events = chunks.opening(index)
            if delta.output.tool_calls:
                called.add(index)
            if delta.finish is None:
                events += chunks.output(index, delta, logprobs)
            else:
                usages[index] = delta.finish.usage
                events += chunks.finish(index, delta, finish_reason(delta.finish, index in called), logprobs)
            last = len(usages) == len(runs)
            if last:
                if resumptions := sum(run.resumptions for run in runs):
                    events = with_field(events, _RESUMPTIONS_HEADER, resumptions)
                ordered = [usages[number] for number in range(len(runs))]
                events += chunks.closing(usage_object(ordered, continuations))
            if events:
                await exchange.send_events(events, last=last)
            if diverts and not last:
                diverts = False
                runs[0].divert(exchange.writable, partial(_pass_on, exchange, chunks, called))
                if (around := chunks.around_token()) is not None:
                    runs[0].relay_tokens(exchange.number_writer(*around))


def _pass_on(exchange: Exchange, chunks: CompletionChunks, called: set[int], delta: Delta) -> None:
    """Sends the events of a delta of the only choice at once."""
    if delta.output.tool_calls:
        called.add(0)
    if events := chunks.output(0, delta):
        exchange.write_events(events)
