"""The items of one Encode call: each is answered like a call of its own; answers that are ready together share a message."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from sapwood.v1 import tokenizer_pb2
from sapwood_common.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    ResourceExhaustedError,
    SapwoodError,
    UnavailableError,
)
from sapwood_common.network.channel import MAX_MESSAGE_BYTES
from sapwood_common.serving.interceptor import as_told
from sapwood_common.serving.rpc_telemetry import RpcTelemetry
from sapwood_common.telemetry.logs import TRACEPARENT_KEY, is_valid_request_id, request_id_var
from sapwood_tokenizer.serve.convert import write_error

Tokenize = Callable[[tokenizer_pb2.TokenizeRequest], Awaitable[tokenizer_pb2.TokenizeResponse]]
ApplyChatTemplate = Callable[
    [tokenizer_pb2.ApplyChatTemplateRequest], Awaitable[tokenizer_pb2.ApplyChatTemplateResponse]
]

_SERVICE = "/sapwood.v1.Tokenizer/"
_METHODS = {"tokenize": f"{_SERVICE}Tokenize", "apply_chat_template": f"{_SERVICE}ApplyChatTemplate"}
"""The method under which an item is counted, timed and traced."""

_MOST_ITEMS = 4096
_MOST_BYTES = 64 * 1024 * 1024
"""Items under way, and their bytes, above which no further request is read."""
_ITEMS_A_TURN = 64
"""Items begun in one go; then other calls have their turn."""
_RESPONSE_BYTES = 1024 * 1024
"""Bytes after which a response gets no further result."""
_MOST_RESULT_BYTES = MAX_MESSAGE_BYTES - 2 * _RESPONSE_BYTES


@dataclass(slots=True)
class _Item:
    task: asyncio.Task[None]
    size: int
    timer: asyncio.TimerHandle | None


class EncodeCall:
    """Answers the items of one call.

    An item is under way until its result has left, so a client that reads nothing is soon read no further itself.

    Args:
        tokenize: Answers items that are texts.
        apply_chat_template: Answers items that are conversations.
        telemetry: Measures the items, as calls of the method that does the same.
        draining: Set when the service is about to stop: later items are refused, and the call ends with its last item.
    """

    def __init__(
        self,
        tokenize: Tokenize,
        apply_chat_template: ApplyChatTemplate,
        telemetry: RpcTelemetry,
        draining: asyncio.Event,
    ) -> None:
        self._tokenize = tokenize
        self._apply_chat_template = apply_chat_template
        self._telemetry = telemetry
        self._draining = draining
        self._items: dict[int, _Item] = {}
        self._bytes = 0
        self._ready: deque[tuple[tokenizer_pb2.EncodeResult, int]] = deque()
        """Results that are ready, with their sizes in bytes."""
        self._changed = asyncio.Event()
        self._room = asyncio.Event()

    async def answer(
        self, requests: AsyncIterator[tokenizer_pb2.EncodeRequest]
    ) -> AsyncGenerator[tokenizer_pb2.EncodeResponse]:
        """The responses to the call's requests. Closing it cancels the items.

        Raises:
            InvalidArgumentError: An id is under way already, or a request is malformed.
        """
        reading = asyncio.ensure_future(self._read(requests))
        draining = asyncio.ensure_future(self._draining.wait())
        for task in (reading, draining):
            task.add_done_callback(lambda _: self._changed.set())
        try:
            yield tokenizer_pb2.EncodeResponse()  # tells the client that the call is accepted
            while True:
                if reading.done():
                    reading.result()
                if self._ready:
                    response = self._next_response()
                    if response.results:
                        yield response
                elif not self._items and (reading.done() or draining.done()):
                    return
                else:
                    self._changed.clear()
                    await self._changed.wait()
        finally:
            reading.cancel()
            draining.cancel()
            for item_id in tuple(self._items):
                self._forget(item_id)

    async def _read(self, requests: AsyncIterator[tokenizer_pb2.EncodeRequest]) -> None:
        async for request in requests:
            for number, item in enumerate(request.items, 1):
                self._take(item)
                if number % _ITEMS_A_TURN == 0:
                    await asyncio.sleep(0)
            while len(self._items) > _MOST_ITEMS or self._bytes > _MOST_BYTES:
                self._room.clear()
                await self._room.wait()

    def _take(self, item: tokenizer_pb2.EncodeItem) -> None:
        if item.cancel:
            self._forget(item.id)
            return
        if item.id in self._items:
            raise InvalidArgumentError(f"an item with the id {item.id} is under way already", field="items.id")
        loop = asyncio.get_running_loop()
        timer = None
        if item.HasField("timeout_ms"):
            timer = loop.call_later(item.timeout_ms / 1000, self._expire, item.id)
        size = item.ByteSize()
        self._bytes += size
        self._items[item.id] = _Item(loop.create_task(self._answer(item)), size, timer)

    async def _answer(self, item: tokenizer_pb2.EncodeItem) -> None:
        if is_valid_request_id(item.request_id):
            request_id_var.set(item.request_id)
        result = tokenizer_pb2.EncodeResult(id=item.id)
        work = item.WhichOneof("work")
        method = _METHODS.get(work or "", f"{_SERVICE}Encode")
        running = self._telemetry.begin(method, ((TRACEPARENT_KEY, item.traceparent),))
        ended: BaseException | None = None
        try:
            if self._draining.is_set():
                raise UnavailableError("this service is shutting down", retry_after=1.0)
            if work == "tokenize":
                result.tokenize.CopyFrom(await self._tokenize(item.tokenize))
            elif work == "apply_chat_template":
                result.apply_chat_template.CopyFrom(await self._apply_chat_template(item.apply_chat_template))
            else:
                raise InvalidArgumentError("an item is neither texts nor a conversation", field="items.work")
            size = result.ByteSize()
            if size > _MOST_RESULT_BYTES:
                raise ResourceExhaustedError(f"an answer of {size} bytes is more than a message may have")
        except BaseException as error:
            ended = error
            if not isinstance(error, Exception):
                raise
            result = _failed(item.id, as_told(method, error))
            size = result.ByteSize()
        finally:
            running.end(ended)
        self._finish(result, size)

    def _expire(self, item_id: int) -> None:
        error = DeadlineExceededError("the deadline passed")
        self._items[item_id].task.cancel()
        self._finish(_failed(item_id, error), 0)

    def _finish(self, result: tokenizer_pb2.EncodeResult, size: int) -> None:
        item = self._items[result.id]
        if item.timer is not None:
            item.timer.cancel()
        self._ready.append((result, size))
        self._changed.set()

    def _next_response(self) -> tokenizer_pb2.EncodeResponse:
        response = tokenizer_pb2.EncodeResponse()
        total = 0
        while self._ready and total < _RESPONSE_BYTES:
            result, size = self._ready.popleft()
            if result.id in self._items:  # else it was cancelled
                self._forget(result.id)
                response.results.append(result)
                total += size
        return response

    def _forget(self, item_id: int) -> None:
        item = self._items.pop(item_id, None)
        if item is not None:
            item.task.cancel()
            if item.timer is not None:
                item.timer.cancel()
            self._bytes -= item.size
            self._room.set()
            self._changed.set()


def _failed(item_id: int, error: SapwoodError) -> tokenizer_pb2.EncodeResult:
    result = tokenizer_pb2.EncodeResult(id=item_id)
    write_error(error, result.error)
    return result
