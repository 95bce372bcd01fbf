"""Completions and chats of models that backends have: bodies and answers pass unchanged, except for the model's name."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import msgspec

from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.errors import InvalidArgumentError
from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.edges.http.json_body import decode_object
from sapwood_router.edges.openai.chat import CHAT_FIELDS
from sapwood_router.edges.routes import Answerer
from sapwood_router.edges.sending import told_headers, with_resumptions
from sapwood_router.flow.generation import Pipeline
from sapwood_router.flow.relay.asked import Asked, Kind
from sapwood_router.request.context import ChatPrompt, Prompt, RequestContext, TextPrompt, Turn, unique_id
from sapwood_router.request.output import OutputOptions

_DONE = b"data: [DONE]\n\n"


class _Said(msgspec.Struct):
    """What the router itself reads of a body."""

    model: str | None = None
    stream: bool | None = None
    request_id: str | None = None
    rid: str | None = None
    priority: int | None = None
    cache_salt: str | None = None


def or_relay(kind: Kind, answer: Answerer) -> Answerer:
    """The handler of a path: ``answer``, except for models that backends have.

    Args:
        kind: What the path is for.
        answer: Answers for workers' models.
    """

    async def either(exchange: Exchange, body: bytes, pipeline: Pipeline, deadline: float) -> None:
        given = decode_object(body)
        model = given.get("model")
        if (model is None or isinstance(model, str)) and pipeline.relay.serves(model):
            await relay(exchange, kind, given, pipeline, deadline)
            return
        del given
        await answer(exchange, body, pipeline, deadline)

    def choose(exchange: Exchange, body: bytes, pipeline: Pipeline, deadline: float) -> Awaitable[None]:
        return (either if pipeline.registry.has_backends else answer)(exchange, body, pipeline, deadline)

    return choose


async def relay(exchange: Exchange, kind: Kind, given: dict[str, Any], pipeline: Pipeline, deadline: float) -> None:
    """Answers a request through a backend.

    Raises:
        SapwoodError: It is wrong, or it failed.
    """
    try:
        said = msgspec.convert(given, _Said)
    except msgspec.ValidationError as error:
        raise InvalidArgumentError(str(error), field=str(error).partition("`$.")[2].rstrip("`") or None) from error
    if given.get("session") is not None:  # the backend would answer as if nothing had been said before
        raise InvalidArgumentError(
            f"model {said.model or 'asked for'!r} is a backend's, which has no sessions", field="session"
        )
    exchange.accept_body_id(said)
    context = RequestContext(
        request_id=exchange.request_id,
        worker_request_id=unique_id(exchange.request_id),
        prompt=_prompt(kind, given),
        sampling=SamplingParams(),
        output=OutputOptions(),
        fields=CHAT_FIELDS,
        deadline=deadline if said.stream else exchange.sooner(deadline),
        model=said.model,
        whole=not said.stream,
        caller=exchange.caller(said, given),
    )
    asked = Asked(kind, given, context)

    async def send_whole(answer: dict[str, Any]) -> None:
        await exchange.send_body(200, msgspec.json.encode(answer), told_headers(exchange.workers, [context]))

    async def send_chunk(chunk: dict[str, Any]) -> None:
        event = b"data: %b\n\n" % msgspec.json.encode(chunk)
        if context.resumptions and any(choice.get("finish_reason") for choice in chunk["choices"]):
            event = with_resumptions(event, context.resumptions)
        await exchange.send_events(event)

    exchange.on_disconnect(lambda: None)
    await pipeline.relay.answer(asked, send_chunk if said.stream else send_whole)
    if said.stream:
        await exchange.send_events(_DONE, last=True)


def _prompt(kind: Kind, given: dict[str, Any]) -> Prompt:
    """The text of a request for the log, if texts are logged."""
    said = given.get("messages" if kind == "chat" else "prompt")
    text = said if isinstance(said, str) else msgspec.json.encode(said).decode()
    return ChatPrompt((Turn("messages", text),)) if kind == "chat" else TextPrompt(text)
