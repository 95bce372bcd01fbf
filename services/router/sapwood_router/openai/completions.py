"""``POST /v1/completions``."""

from __future__ import annotations

import time
from typing import Any

from sapwood_common.errors import InvalidArgumentError
from sapwood_router.context import FieldNames, Prompt, RequestContext, TextPrompt, TokenPrompt
from sapwood_router.openai.answer import Answer, send_stream, send_whole
from sapwood_router.openai.body import convert, decode_object
from sapwood_router.openai.exchange import Exchange
from sapwood_router.openai.parameters import output_of, sampling_of, wants_stream
from sapwood_router.openai.response_format import answer_grammar
from sapwood_router.openai.sse import CompletionChunks
from sapwood_router.openai.types import (
    COMPLETION_NEUTRAL,
    IGNORED,
    CompletionChoice,
    CompletionRequest,
    CompletionResponse,
    UsageObject,
)
from sapwood_router.pipeline.pipeline import Pipeline, Run
from sapwood_router.request_ids import unique_id

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 1024


async def complete(exchange: Exchange, body: bytes, pipeline: Pipeline, deadline: float) -> None:
    """Answers a request.

    Raises:
        SapwoodError: It is wrong, or it failed.
    """
    request = convert(decode_object(body), CompletionRequest, COMPLETION_NEUTRAL, IGNORED)
    stream, include_usage = wants_stream(request)
    contexts = _contexts(request, exchange.request_id, deadline)
    runs = [pipeline.open(context) for context in contexts]
    exchange.on_disconnect(lambda: _close(runs))
    answer_id, created = f"cmpl-{exchange.request_id}", int(time.time())

    def make_body(answers: list[Answer], usage: UsageObject) -> CompletionResponse:
        choices = [
            CompletionChoice(index, answer.output.text, answer.finish.reason.value)
            for index, answer in enumerate(answers)
        ]
        return CompletionResponse(
            id=answer_id, created=created, model=contexts[0].model or "", choices=choices, usage=usage
        )

    try:
        if stream:
            await send_stream(
                exchange, runs, lambda: CompletionChunks(answer_id, created, contexts[0].model or "", include_usage)
            )
        else:
            await send_whole(exchange, runs, make_body)
    finally:
        _close(runs)


def _contexts(request: CompletionRequest, request_id: str, deadline: float) -> list[RequestContext]:
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    grammar, grammar_field = answer_grammar(request)
    sampling, output = sampling_of(request, max_tokens), output_of(request)
    return [
        RequestContext(
            request_id=request_id,
            worker_request_id=unique_id(request_id),
            prompt=prompt,
            sampling=sampling,
            output=output,
            fields=FieldNames(prompt=name, sampling="", max_tokens="max_tokens", grammar=grammar_field),
            deadline=deadline,
            model=request.model,
            grammar=grammar,
        )
        for name, prompt in _prompts(request.prompt)
    ]


def _prompts(value: Any) -> list[tuple[str, Prompt]]:
    """The prompts and their names in errors."""
    if isinstance(value, str):
        return [("prompt", TextPrompt(value))]
    if value is None:
        raise InvalidArgumentError("prompt is required", field="prompt")
    if not isinstance(value, list):
        raise InvalidArgumentError("prompt must be a string, strings, token ids or lists of token ids", field="prompt")
    if not value:
        raise InvalidArgumentError("the prompt is empty", field="prompt")
    if _is_tokens(value):
        return [("prompt", TokenPrompt(value))]
    if len(value) > MAX_PROMPTS:
        raise InvalidArgumentError(f"at most {MAX_PROMPTS} prompts a request, got {len(value)}", field="prompt")
    named: list[tuple[str, Prompt]] = []
    for index, item in enumerate(value):
        name = f"prompt[{index}]"
        if isinstance(item, str):
            named.append((name, TextPrompt(item)))
        elif isinstance(item, list) and _is_tokens(item):
            named.append((name, TokenPrompt(item)))
        else:
            raise InvalidArgumentError(f"{name} must be a string or token ids", field=name)
    return named


def _is_tokens(value: list[Any]) -> bool:
    return all(type(item) is int for item in value)


def _close(runs: list[Run]) -> None:
    for run in runs:
        run.close()
