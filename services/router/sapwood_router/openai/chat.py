"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time

from sapwood_common.errors import InvalidArgumentError
from sapwood_router.context import ChatPrompt, FieldNames, RequestContext, Turn
from sapwood_router.openai.answer import Answer, send_stream, send_whole
from sapwood_router.openai.body import convert, decode_object
from sapwood_router.openai.exchange import Exchange
from sapwood_router.openai.parameters import sampling_of, stop_of, wants_stream
from sapwood_router.openai.sse import ChatChunks
from sapwood_router.openai.types import (
    CHAT_NEUTRAL,
    IGNORED,
    AnswerMessage,
    ChatChoice,
    ChatRequest,
    ChatResponse,
    Message,
    UsageObject,
)
from sapwood_router.pipeline.pipeline import Pipeline

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Roles that are taken; OpenAI renamed system to developer for its newer models."""


async def chat(exchange: Exchange, body: bytes, pipeline: Pipeline, deadline: float) -> None:
    """Answers a request.

    Raises:
        SapwoodError: It is wrong, or it failed.
    """
    request = convert(decode_object(body), ChatRequest, CHAT_NEUTRAL, IGNORED)
    stream, include_usage = wants_stream(request)
    context = _context(request, exchange.request_id, deadline)
    run = pipeline.open(context)
    exchange.on_disconnect(run.close)
    answer_id, created = f"chatcmpl-{exchange.request_id}", int(time.time())

    def make_body(answers: list[Answer], usage: UsageObject) -> ChatResponse:
        choices = [
            ChatChoice(index, AnswerMessage(answer.text), answer.finish.reason.value)
            for index, answer in enumerate(answers)
        ]
        return ChatResponse(id=answer_id, created=created, model=context.model or "", choices=choices, usage=usage)

    try:
        if stream:
            await send_stream(
                exchange, [run], lambda: ChatChunks(answer_id, created, context.model or "", include_usage)
            )
        else:
            await send_whole(exchange, [run], make_body)
    finally:
        run.close()


def _context(request: ChatRequest, request_id: str, deadline: float) -> RequestContext:
    if request.max_tokens is not None and request.max_completion_tokens is not None:
        raise InvalidArgumentError("set max_completion_tokens or max_tokens, not both", field="max_tokens")
    newer = request.max_completion_tokens is not None
    max_tokens = request.max_completion_tokens if newer else request.max_tokens
    return RequestContext(
        request_id=request_id,
        prompt=ChatPrompt(tuple(_turn(message, f"messages[{i}]") for i, message in enumerate(request.messages))),
        sampling=sampling_of(request, max_tokens),
        stop=stop_of(request),
        fields=FieldNames(
            prompt="messages", sampling="", max_tokens="max_completion_tokens" if newer else "max_tokens"
        ),
        deadline=deadline,
        model=request.model,
        skip_special_tokens=request.skip_special_tokens is not False,
    )


def _turn(message: Message, path: str) -> Turn:
    role = _ROLES.get(message.role)
    if role is None:
        raise InvalidArgumentError(f"role {message.role!r} is not supported", field=f"{path}.role")
    for name, given in (
        ("name", message.name),
        ("tool_calls", message.tool_calls),
        ("function_call", message.function_call),
        ("audio", message.audio),
        ("tool_call_id", message.tool_call_id),
        ("refusal", message.refusal),
    ):
        if given:
            raise InvalidArgumentError(f"{name} is not supported", field=f"{path}.{name}")
    if message.content is None:
        raise InvalidArgumentError("content is required", field=f"{path}.content")
    if isinstance(message.content, str):
        return Turn(role, message.content)
    texts = []
    for index, part in enumerate(message.content):
        if part.type != "text":
            raise InvalidArgumentError(
                f"content of type {part.type!r} is not supported", field=f"{path}.content[{index}].type"
            )
        if part.text is None:
            raise InvalidArgumentError("text is required", field=f"{path}.content[{index}].text")
        texts.append(part.text)
    return Turn(role, "".join(texts))
