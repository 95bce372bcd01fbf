"""Runs the requests behind one HTTP request and sends their answer: one body, or events as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import msgspec

from sapwood_router.context import Delta, Finish, FinishReason, Usage
from sapwood_router.openai.exchange import Exchange
from sapwood_router.openai.sse import CompletionChunks
from sapwood_router.openai.types import PromptTokensDetails, UsageObject
from sapwood_router.output import Output, OutputBuffer
from sapwood_router.pipeline.pipeline import Run


@dataclass(slots=True)
class Answer:
    """A complete generation."""

    output: Output
    finish: Finish


def finish_reason(finish: Finish, called: bool) -> str:
    """OpenAI's word for why a generation ended; ``called`` says whether it has tool calls."""
    return "tool_calls" if called and finish.reason is FinishReason.STOP else finish.reason.value


def usage_object(usages: Sequence[Usage]) -> UsageObject:
    """The usage of several requests together."""
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    cached = sum(usage.cached_tokens for usage in usages)
    return UsageObject(prompt, completion, prompt + completion, PromptTokensDetails(cached))


async def send_whole(
    exchange: Exchange, runs: Sequence[Run], make_body: Callable[[list[Answer], UsageObject], msgspec.Struct]
) -> None:
    """Waits for all answers and sends them as one body.

    Raises:
        SapwoodError: One of the requests failed; the others are ended.
    """
    outputs = [OutputBuffer() for _ in runs]
    finishes: list[Finish | None] = [None] * len(runs)
    async with aclosing(_merged(runs)) as deltas:
        async for index, delta in deltas:
            outputs[index].add(delta.output)
            finishes[index] = delta.finish
    answers = [
        Answer(output.take(), finish) for output, finish in zip(outputs, finishes, strict=True) if finish is not None
    ]
    assert len(answers) == len(runs), "each run ends with a finish or an error"
    body = make_body(answers, usage_object([answer.finish.usage for answer in answers]))
    await exchange.send_body(200, msgspec.json.encode(body))


async def send_stream(exchange: Exchange, runs: Sequence[Run], make_chunks: Callable[[], CompletionChunks]) -> None:
    """Sends events as text comes. The response starts with the first text, so an error before it has its own status.

    Raises:
        SapwoodError: One of the requests failed; the others are ended.
    """
    chunks: CompletionChunks | None = None
    opened: set[int] = set()
    called: set[int] = set()
    usages: list[Usage] = []
    async with aclosing(_merged(runs)) as deltas:
        async for index, delta in deltas:
            chunks = chunks or make_chunks()
            events = b""
            if index not in opened:
                opened.add(index)
                events = chunks.opening(index)
            if delta.output.tool_calls:
                called.add(index)
            if delta.finish is None:
                events += chunks.output(index, delta.output)
            else:
                usages.append(delta.finish.usage)
                events += chunks.finish(index, delta.output, finish_reason(delta.finish, index in called))
            last = len(usages) == len(runs)
            if last:
                events += chunks.closing(usage_object(usages))
            if events:
                await exchange.send_events(events, last=last)


async def _merged(runs: Sequence[Run]) -> AsyncGenerator[tuple[int, Delta], None]:
    if len(runs) == 1:
        while (delta := await runs[0].next()) is not None:
            yield 0, delta
        return
    queue: asyncio.Queue[tuple[int, Delta | Exception | None]] = asyncio.Queue(maxsize=1)

    async def follow(index: int, run: Run) -> None:
        try:
            while (delta := await run.next()) is not None:
                await queue.put((index, delta))
            await queue.put((index, None))
        except Exception as error:
            await queue.put((index, error))

    tasks = [asyncio.ensure_future(follow(index, run)) for index, run in enumerate(runs)]
    left = len(runs)
    try:
        while left:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
