"""``POST /v1/embeddings``."""

from __future__ import annotations

import base64
import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from sapwood_common.contract.limits import MOST_EMBEDDED
from sapwood_common.errors import InvalidArgumentError, SapwoodError
from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.edges.http.json_body import convert, decode_object
from sapwood_router.edges.openai.chat import CHAT_FIELDS, chat_prompt
from sapwood_router.edges.openai.other_parameters import EMBEDDING_NEUTRAL, IGNORED
from sapwood_router.edges.openai.types import AnyRequest, ChatRequest, Message
from sapwood_router.flow.generation import Pipeline
from sapwood_router.request.caller import Caller
from sapwood_router.request.embed_request import Embeddings, EmbedRequest
from sapwood_router.request.field_names import to_client_field
from sapwood_router.request.tokens import are_tokens
from sapwood_router.request.validation import check_prompt


class EmbeddingRequest(AnyRequest, kw_only=True):
    """``POST /v1/embeddings``; ``pooling``, ``normalize`` and ``prompt_name`` are extensions, and conversations, as with vLLM."""

    input: Any = None  # a string, strings, token ids or lists of token ids
    encoding_format: str | None = None
    dimensions: int | None = None
    pooling: str | None = None
    normalize: bool | None = None
    prompt_name: str | None = None
    messages: list[Message] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class EmbeddingObject(msgspec.Struct):
    """One vector."""

    index: int
    embedding: Sequence[float] | str
    object: str = "embedding"


class EmbeddingUsage(msgspec.Struct):
    """``usage``."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(msgspec.Struct):
    """The answer. ``id`` and ``created`` are not OpenAI's; vLLM tells them too, and Mistral's client needs the first."""

    id: str
    created: int
    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingUsage
    object: str = "list"


async def embed(exchange: Exchange, body: bytes, pipeline: Pipeline, deadline: float) -> None:
    """Answers a request.

    Raises:
        SapwoodError: It is wrong, or it failed.
    """
    request, given = await read(exchange, body)
    found = await vectors_of(request, given, exchange, pipeline, deadline)
    encode = encoder_of(request)
    data = [EmbeddingObject(index, encode(vector)) for index, vector in enumerate(found.vectors)]
    usage = EmbeddingUsage(found.prompt_tokens, found.prompt_tokens)
    answer = EmbeddingResponse(f"embd-{exchange.request_id}", int(time.time()), data, found.model, usage)
    await exchange.send_body(200, msgspec.json.encode(answer))


async def read(exchange: Exchange, body: bytes) -> tuple[EmbeddingRequest, dict[str, Any]]:
    """The checked request, and as it came.

    Raises:
        InvalidArgumentError: It is wrong.
    """
    given = decode_object(body)
    request = convert(given, EmbeddingRequest, EMBEDDING_NEUTRAL, IGNORED, left_out=exchange.left_out)
    exchange.accept_body_id(request)
    if request.encoding_format not in (None, "float", "base64"):
        raise InvalidArgumentError('encoding_format must be "float" or "base64"', field="encoding_format")
    if request.pooling not in (None, "mean", "last", "cls"):
        raise InvalidArgumentError('pooling must be "mean", "last" or "cls"', field="pooling")
    if request.truncation_side == "left":
        raise InvalidArgumentError("inputs to embed are cut at their end", field="truncation_side")
    return request, given


async def vectors_of(
    request: EmbeddingRequest,
    given: dict[str, Any],
    exchange: Exchange,
    pipeline: Pipeline,
    deadline: float,
    *,
    classifies: bool = False,
) -> Embeddings:
    """The vectors of a request's inputs, or the logits of the model's labels.

    Raises:
        SapwoodError: It is wrong, or it failed.
    """
    deadline, caller = exchange.sooner(deadline), exchange.caller(request, given)
    inputs: Sequence[str | list[int]]
    if request.messages is None:
        inputs, names = inputs_of(request.input)
    elif request.input is not None:
        raise InvalidArgumentError("set input or messages, not both", field="messages")
    else:
        inputs, names = [await _conversation(request, exchange, pipeline, deadline, caller)], ["messages"]
    wanted = EmbedRequest(
        request_id=exchange.request_id,
        inputs=inputs,
        names=names,
        model=request.model,
        pooling=None if classifies else request.pooling,
        normalize=None if classifies else request.normalize,
        dimensions=None if classifies else request.dimensions,
        prompt_name=request.prompt_name,
        max_tokens=request.truncate_prompt_tokens,
        deadline=deadline,
        caller=caller,
        classifies=classifies,
    )
    exchange.on_disconnect(lambda: None)
    return await pipeline.embedder.embed(wanted)


def encoder_of(request: EmbeddingRequest) -> Callable[[Sequence[float]], list[float] | str]:
    """Makes of a vector what the client asked for."""
    return base64_of if request.encoding_format == "base64" else list[float]


async def _conversation(
    request: EmbeddingRequest, exchange: Exchange, pipeline: Pipeline, deadline: float, caller: Caller
) -> list[int]:
    """The tokens of a conversation. The assistant's turn is not opened unless the client says so: nothing is answered."""
    chat = ChatRequest(
        messages=request.messages or [],
        chat_template_kwargs=request.chat_template_kwargs,
        add_generation_prompt=request.add_generation_prompt is True,
        continue_final_message=request.continue_final_message,
    )
    prompt = await exchange.in_turns(chat_prompt(chat, None, exchange.left_out))
    check_prompt(prompt, CHAT_FIELDS)
    for index, turn in enumerate(prompt.turns):
        for place, item in enumerate(turn.items):
            if not isinstance(item, str):
                raise InvalidArgumentError(
                    "embeddings, classes and scores are of text alone: pictures and videos are not supported here",
                    field=f"messages[{index}].content[{place}]",
                )
    model = pipeline.registry.resolve(request.model)
    client, most_tokens = pipeline.tokenizers.of(model).client, partial(pipeline.registry.context_length, model)
    try:
        encoded = await client.encode_chat(
            prompt, exchange.request_id, deadline, caller.cache_salt, most_tokens=most_tokens
        )
    except SapwoodError as error:
        raise to_client_field(error, CHAT_FIELDS) from error
    return list(encoded.token_ids)


def base64_of(vector: Sequence[float]) -> str:
    """Little-endian float32, as OpenAI's clients ask for."""
    return base64.b64encode(array("f", vector).tobytes()).decode()


def inputs_of(value: Any) -> tuple[list[str | list[int]], list[str]]:
    """The inputs of a request, and the client's name of each.

    Raises:
        InvalidArgumentError: There is none, or there are too many, or one is neither text nor token ids.
    """
    if isinstance(value, str):
        return [value], ["input"]
    if value is None:
        raise InvalidArgumentError("input is required", field="input")
    if not isinstance(value, list) or not value:
        raise InvalidArgumentError("input must be a string, strings, token ids or lists of token ids", field="input")
    if are_tokens(value):
        return [value], ["input"]
    if len(value) > MOST_EMBEDDED:
        raise InvalidArgumentError(f"at most {MOST_EMBEDDED} inputs, got {len(value)}", field="input")
    names = [f"input[{index}]" for index in range(len(value))]
    for name, item in zip(names, value, strict=True):
        if not isinstance(item, str) and not (isinstance(item, list) and are_tokens(item)):
            raise InvalidArgumentError(f"{name} must be a string or token ids", field=name)
    return value, names
