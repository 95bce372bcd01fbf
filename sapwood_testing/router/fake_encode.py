"""Encode for tokenizers that are not the real one: each item by the methods that do the same for one request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Protocol

import grpc

from sapwood.v1 import tokenizer_pb2
from sapwood_common.errors import SapwoodError
from sapwood_common.status import code_number, reason_of
from sapwood_common.telemetry.logs import request_id_var

Context = grpc.aio.ServicerContext[Any, Any]


class Encodes(Protocol):
    """What answers one request at a time."""

    async def Tokenize(  # noqa: N802
        self, request: tokenizer_pb2.TokenizeRequest, context: Context
    ) -> tokenizer_pb2.TokenizeResponse:
        """Texts to tokens."""
        ...

    async def ApplyChatTemplate(  # noqa: N802
        self, request: tokenizer_pb2.ApplyChatTemplateRequest, context: Context
    ) -> tokenizer_pb2.ApplyChatTemplateResponse:
        """A conversation to tokens."""
        ...


async def encode_items(
    service: Encodes,
    requests: AsyncIterator[tokenizer_pb2.EncodeRequest],
    context: Context,
) -> AsyncGenerator[tokenizer_pb2.EncodeResponse]:
    """Answers the items of a call, each as soon as it is ready; an error that is none of ours ends the call."""
    answers: asyncio.Queue[asyncio.Task[tokenizer_pb2.EncodeResult]] = asyncio.Queue()
    items: dict[int, asyncio.Task[tokenizer_pb2.EncodeResult]] = {}

    async def read() -> None:
        async for request in requests:
            for item in request.items:
                if item.cancel:
                    items[item.id].cancel()
                else:
                    items[item.id] = task = asyncio.create_task(_answer(service, item, context))
                    task.add_done_callback(answers.put_nowait)

    reading = asyncio.create_task(read())
    try:
        yield tokenizer_pb2.EncodeResponse()
        while True:
            answer = await answers.get()
            if not answer.cancelled():
                yield tokenizer_pb2.EncodeResponse(results=[answer.result()])
    finally:
        reading.cancel()
        for task in items.values():
            task.cancel()


async def _answer(service: Encodes, item: tokenizer_pb2.EncodeItem, context: Context) -> tokenizer_pb2.EncodeResult:
    request_id_var.set(item.request_id)
    result = tokenizer_pb2.EncodeResult(id=item.id)
    try:
        if item.HasField("tokenize"):
            result.tokenize.CopyFrom(await service.Tokenize(item.tokenize, context))
        else:
            result.apply_chat_template.CopyFrom(await service.ApplyChatTemplate(item.apply_chat_template, context))
    except SapwoodError as error:
        result.error.code, result.error.message = code_number(error), error.message
        result.error.field, result.error.reason = error.field or "", reason_of(error)
        if error.retry_after is not None:
            result.error.retry_after_ms = round(error.retry_after * 1000)
    return result
