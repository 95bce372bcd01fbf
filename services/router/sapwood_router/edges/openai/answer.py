"""OpenAI's answers: one body of all choices, or events as they come."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from sapwood_net.pacing.heavy_work import A_FEW
from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.edges.openai.annotate import Annotator
from sapwood_router.edges.openai.types import CompletionTokensDetails, PromptTokensDetails, UsageObject
from sapwood_router.edges.sending import Events, Running, collect, send_events, told_headers
from sapwood_router.flow.generation import Pipeline
from sapwood_router.request.context import Delta, Finish, FinishReason, RequestContext, Usage
from sapwood_router.request.output import Output


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
    prompt = cached = written = completion = accepted = rejected = reasoning = 0
    for usage in usages[::continuations]:
        prompt += usage.prompt_tokens
        cached += usage.cached_tokens
        written += usage.written_tokens
    for usage in usages:
        completion += usage.completion_tokens
        accepted += usage.accepted_prediction_tokens
        rejected += usage.rejected_prediction_tokens
        reasoning += usage.reasoning_tokens
    some = accepted or rejected or reasoning
    details = CompletionTokensDetails(accepted, rejected, reasoning) if some else msgspec.UNSET
    return UsageObject(
        prompt, completion, prompt + completion, PromptTokensDetails(cached, written or msgspec.UNSET), details
    )


async def send_answer(
    exchange: Exchange,
    pipeline: Pipeline,
    contexts: Sequence[RequestContext],
    annotator: Annotator,
    make_body: Callable[[list[Answer]], Awaitable[msgspec.Struct]],
    events: Events | None,
) -> None:
    """Runs the requests and sends their answer.

    Args:
        exchange: Where it goes.
        pipeline: Runs them.
        contexts: The requests.
        annotator: Annotates their deltas.
        make_body: Makes one body of all answers; headers then say what gRPC's trailing metadata does.
        events: Writes events as output comes; None: there is to be one body.

    Raises:
        SapwoodError: One of the requests failed; the others are ended.
    """
    if events is not None:
        await send_events(exchange, contexts, pipeline, events, annotator)
        return
    async with Running(exchange, pipeline, contexts) as runs:
        answers: list[Answer] = []
        for whole in await collect(runs):
            if len(answers) % A_FEW == A_FEW - 1:
                await pipeline.heavy.turn(contexts[0].caller.tenant, goes_on=True)
            answers.append(await _annotated(whole, annotator))
        body = msgspec.json.encode(await make_body(answers))
        await exchange.send_body(200, body, told_headers(exchange.workers, contexts))


async def _annotated(whole: Delta, annotator: Annotator) -> Answer:
    likelihoods = whole.logprobs
    logprobs = await annotator.annotate(whole)
    assert whole.finish is not None, "each run ends with a finish or an error"
    mean = sum(found.logprob for found in likelihoods) / max(1, len(likelihoods))
    return Answer(whole.index, whole.output, whole.token_ids, whole.finish, logprobs, mean)
