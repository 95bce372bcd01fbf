"""``POST /tokenize`` and ``POST /detokenize``, shaped as in vLLM."""

from __future__ import annotations

from array import array
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import Any

import msgspec

from sapwood_common.errors import InvalidArgumentError, SapwoodError
from sapwood_net.pacing.heavy_work import LARGE
from sapwood_net.pacing.steps import Steps
from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.edges.http.json_body import FORMS, Neutral, convert, decode_object
from sapwood_router.edges.http.left_out import LeftOut
from sapwood_router.edges.openai.chat import CHAT_FIELDS, chat_prompt
from sapwood_router.edges.openai.logprobs import text_of
from sapwood_router.edges.openai.types import AnyRequest, ChatRequest, Message, Tool
from sapwood_router.flow.generation import Pipeline
from sapwood_router.request.context import ChatPrompt, FieldNames
from sapwood_router.request.field_names import to_client_field
from sapwood_router.request.tokens import TokenIds, pieces
from sapwood_router.request.validation import check_prompt, check_token_ids

CHAT_NEUTRAL: Neutral = {
    "add_special_tokens": (False,),  # the template writes them
    "chat_template": ("",),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
}
"""Parameters of conversations that are taken only with the values that ask for nothing."""

_AT_ONCE = 16_384
"""Tokens that are looked at in one turn of the event loop."""
_TEXT_FIELDS = FieldNames(prompt="prompt")


class TokenizeTextRequest(AnyRequest, kw_only=True):
    """A text to make tokens of."""

    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatRequest(AnyRequest, kw_only=True):
    """A conversation to make tokens of."""

    messages: list[Message]
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    enable_thinking: bool | None = None
    thinking: Any = None


class TokenizeResponse(msgspec.Struct):
    """The answer; ``token_strs`` are the texts that the tokens stand for. It is written in pieces."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(AnyRequest, kw_only=True):
    """Tokens to make a text of."""

    tokens: list[int]


class DetokenizeResponse(msgspec.Struct):
    """The answer; special tokens are shown."""

    prompt: str


async def tokenize(exchange: Exchange, body: bytes, pipeline: Pipeline, deadline: float) -> None:
    """Answers ``/tokenize``.

    Raises:
        SapwoodError: It is wrong, or it failed.
    """
    async with _turn(exchange, len(body), pipeline, exchange.sooner(deadline)):
        await exchange.pause()
        given = decode_object(body)
        request: TokenizeTextRequest | TokenizeChatRequest
        if given.get("messages") is not None:
            request = convert(given, TokenizeChatRequest, CHAT_NEUTRAL, FORMS, left_out=exchange.left_out)
        else:
            request = convert(given, TokenizeTextRequest, {}, FORMS, left_out=exchange.left_out)
        exchange.accept_body_id(request)
        deadline, salt = exchange.sooner(deadline), exchange.caller(request, given).cache_salt
        exchange.on_disconnect(lambda: None)
        model = pipeline.registry.resolve(request.model)
        client, own = pipeline.tokenizers.of(model).client, (exchange.request_id, deadline)
        is_text = isinstance(request, TokenizeTextRequest)
        most_tokens = partial(pipeline.registry.context_length, model)
        ids: TokenIds
        try:
            if isinstance(request, TokenizeTextRequest):
                special = request.add_special_tokens is not False
                texts = [request.prompt]
                (ids,) = await client.encode_texts(texts, *own, salt, add_special=special, most_tokens=most_tokens)
            else:
                prompt = await exchange.in_turns(_prompt(request, given, exchange.left_out))
                check_prompt(prompt, CHAT_FIELDS)
                ids = (await client.encode_chat(prompt, *own, salt, most_tokens=most_tokens)).token_ids
        except SapwoodError as error:
            raise to_client_field(error, _TEXT_FIELDS if is_text else CHAT_FIELDS) from error
        tokens: list[bytes] = []
        shown: list[bytes] = []
        for piece in pieces(ids, _AT_ONCE):
            await exchange.pause()
            tokens.append(msgspec.json.encode(list(piece))[1:-1])
            if request.return_token_strs:
                vocabulary = await client.vocabulary(*own)
                shown.append(msgspec.json.encode([text_of(token, vocabulary) for token in piece])[1:-1])
        length = pipeline.registry.context_length(model)
        strings = b"[%b]" % b",".join(shown) if request.return_token_strs else b"null"
        answer = b'{"count":%d,"max_model_len":%d,"tokens":[%b],"token_strs":%b}'
        await exchange.send_body(200, answer % (len(ids), length, b",".join(tokens), strings))


async def detokenize(exchange: Exchange, body: bytes, pipeline: Pipeline, deadline: float) -> None:
    """Answers ``/detokenize``.

    Raises:
        SapwoodError: It is wrong, or it failed.
    """
    async with _turn(exchange, len(body), pipeline, exchange.sooner(deadline)):
        await exchange.pause()
        given = decode_object(body)
        request = convert(given, DetokenizeRequest, {}, left_out=exchange.left_out)
        given.clear()
        exchange.accept_body_id(request)
        deadline = exchange.sooner(deadline)
        exchange.on_disconnect(lambda: None)
        model = pipeline.registry.resolve(request.model)
        tokenizer = pipeline.tokenizers.of(model)
        text, tokens = "", array("I")
        if request.tokens:
            size = (await tokenizer.client.info(exchange.request_id, deadline)).vocab_size
            for piece in pieces(request.tokens, _AT_ONCE):
                check_token_ids(piece, "tokens")
                if max(piece) >= size:
                    raise InvalidArgumentError(f"token ids must be below {size}, the vocabulary's size", field="tokens")
                tokens.extend(piece)
                await exchange.pause()
            request.tokens.clear()  # a list takes 9 times as much
            text = await tokenizer.text_of(tokens, exchange.request_id, deadline, skip_special_tokens=False)
        await exchange.pause()
        answer = msgspec.json.encode(DetokenizeResponse(text))
        await exchange.send_body(200, answer)


def _turn(exchange: Exchange, size: int, pipeline: Pipeline, deadline: float) -> AbstractAsyncContextManager[None]:
    """A large request has its turn alone, from its parsing to its answer: its tokens take many times its bytes."""
    return pipeline.large.turn(exchange.tenant, deadline) if size >= LARGE else nullcontext()


def _prompt(request: TokenizeChatRequest, given: dict[str, Any], left_out: LeftOut) -> Steps[ChatPrompt]:
    chat = ChatRequest(
        messages=request.messages,
        tools=request.tools,
        chat_template_kwargs=request.chat_template_kwargs,
        enable_thinking=request.enable_thinking,
        thinking=request.thinking,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
    )
    return chat_prompt(chat, given.get("tools"), left_out)
