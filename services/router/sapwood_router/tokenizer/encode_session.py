"""One Encode call to a replica of the tokenizer, shared by the requests whose prompts it encodes.

What the requests of one turn of the event loop ask goes out together, and costs a fraction of the CPU time of grpcio's calls. A
lost call takes its items with it: they are UNAVAILABLE, and their requests ask another replica, or this one again. Until the call
stands, and of a tokenizer that does not know the method, ``up`` is false.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterator

import grpc

from sapwood.v1 import tokenizer_pb2
from sapwood_common.errors import DeadlineExceededError, UnavailableError
from sapwood_common.network.channel import Dialer
from sapwood_net.http2.client.duplex_call import CallEndedError, DuplexCall
from sapwood_router.transport.shared_call import RETRY_INTERVAL, SharedCall, stream_error

logger = logging.getLogger(__name__)

_METHOD = "/sapwood.v1.Tokenizer/Encode"
_UNKNOWN_INTERVAL = 2.0
"""Seconds until a tokenizer is asked again that did not know the method."""
_BYTES_A_MESSAGE = 256 * 1024
_LONGEST_MS = 2**32 - 1

Result = tokenizer_pb2.EncodeResult


class EncodeSession(SharedCall):
    """Asks over one call while :meth:`run` runs.

    Args:
        address: Where the replica is.
        dialer: Connects to it.
        on_lost: Called when the call is lost.
        on_stuck: Called when what is sent there does not arrive.
    """

    MOST_BYTES = 256 * 1024
    """The most an item may have; what is larger would hold up the others and goes in a call of its own."""

    def __init__(
        self, address: str, dialer: Dialer, on_lost: Callable[[], None], on_stuck: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(address, _METHOD, dialer)
        self._on_lost = on_lost
        self._on_stuck = on_stuck
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Result]] = {}
        self._unsent: dict[int, tokenizer_pb2.EncodeItem] = {}

    @property
    def up(self) -> bool:
        """Whether the call stands, and items are taken."""
        return self._stands and self.passes and not self._finishing

    @property
    def load(self) -> int:
        """Items under way."""
        return len(self._waiting)

    async def ask(self, item: tokenizer_pb2.EncodeItem, deadline: float) -> Result:
        """What the tokenizer answers to an item, whose id and time are filled in here; call it only while ``up``.

        Args:
            item: It has at most :attr:`MOST_BYTES`.
            deadline: On the loop's clock.

        Raises:
            SapwoodError: The tokenizer's own error; UnavailableError if the call is lost; DeadlineExceededError.
        """
        loop = asyncio.get_running_loop()
        item_id = item.id = next(self._ids)
        item.timeout_ms = min(max(0, int((deadline - loop.time()) * 1000)), _LONGEST_MS)
        answer: asyncio.Future[Result] = loop.create_future()
        self._waiting[item_id] = answer
        self._unsent[item_id] = item
        self._schedule()
        timer = loop.call_at(deadline, _expire, answer)
        try:
            result = await answer
        finally:
            timer.cancel()
            if self._waiting.pop(item_id, None) is not None:
                self._cancel(item_id)
        if result.WhichOneof("outcome") == "error":
            raise stream_error(result.error)
        return result

    def _stuck(self) -> None:
        self._on_stuck()

    def _opened(self, call: DuplexCall) -> bytes:
        return b""  # items may be sent at once

    def _stopped(self) -> None:
        self._fail_all("this router stops")

    def _take(self, message: bytes) -> Iterator[None]:
        self._stands = True  # the first has no results and comes at once
        waiting = self._waiting
        for number, result in enumerate(tokenizer_pb2.EncodeResponse.FromString(message).results):
            if number:
                yield
            answer = waiting.pop(result.id, None)
            if answer is not None and not answer.done():
                answer.set_result(result)
        self._end_if_finished()

    def _lost(self, end: CallEndedError) -> float:
        self._on_lost()
        if self._waiting:
            logger.info("the encoding call to %s was lost with %d items: %s", self._address, self.load, end)
        self._fail_all(f"tokenizer {self._address}: {end}")
        return _UNKNOWN_INTERVAL if end.code is grpc.StatusCode.UNIMPLEMENTED else RETRY_INTERVAL

    def _fail_all(self, problem: str) -> None:
        waiting, self._waiting = self._waiting, {}
        self._unsent.clear()
        for answer in waiting.values():
            if not answer.done():
                answer.set_exception(UnavailableError(problem, retry_after=1.0))

    def _cancel(self, item_id: int) -> None:
        """Nobody waits for this item any more: its request was closed, or its deadline passed."""
        if self._unsent.pop(item_id, None) is None:
            self._unsent[item_id] = tokenizer_pb2.EncodeItem(id=item_id, cancel=True)
            self._schedule()
        self._end_if_finished()

    def _next_message(self) -> bytes | None:
        unsent = self._unsent
        if len(unsent) == 1:
            _, item = unsent.popitem()
            return tokenizer_pb2.EncodeRequest(items=(item,)).SerializeToString()
        request = tokenizer_pb2.EncodeRequest()
        size = 0
        while unsent and size < _BYTES_A_MESSAGE:
            item = unsent.pop(next(iter(unsent)))
            request.items.append(item)
            size += item.ByteSize()
        return request.SerializeToString() if size else None


def _expire(answer: asyncio.Future[Result]) -> None:
    if not answer.done():
        answer.set_exception(DeadlineExceededError("the deadline passed while the prompt was tokenized"))
