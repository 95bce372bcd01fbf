"""One request's tokens on their way to a client that wants them as they are: no text is made, the tokenizer is not visited."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from sapwood_common.errors import InternalError, SapwoodError
from sapwood_router.output import Output
from sapwood_router.output_stream import WINDOW, OutputChunk, Relay

logger = logging.getLogger(__name__)


class TokenStream:
    """An :class:`~sapwood_router.output_stream.OutputStream` that only counts tokens; they themselves are the request's.

    Args:
        whole: It is read in one piece, at its end: nothing holds the pusher back.

    Attributes:
        relay: See OutputStream. There while the reader waits, which is when nothing is there to be read.
    """

    def __init__(self, *, whole: bool = False) -> None:
        self._whole = whole
        self._tokens = 0
        self._tokens_read = 0
        self._end_pushed = False
        self._closed = False
        self._error: SapwoodError | None = None
        self.relay: Relay | None = None
        self._relay: Relay | None = None
        self._divert: Callable[[], bool] | None = None
        self._reader: asyncio.Future[None] | None = None
        self._pusher: asyncio.Future[None] | None = None

    @property
    def over(self) -> bool:
        """See OutputStream."""
        return self._end_pushed or self._closed or self._error is not None

    @property
    def full(self) -> bool:
        """Whether WINDOW tokens or more wait to be read."""
        return self._tokens - self._tokens_read >= WINDOW and not (self._whole or self.over)

    def push(self, token_ids: Sequence[int], *, end: bool = False) -> bool:
        """See OutputStream."""
        if self._end_pushed or self._closed or self._error is not None:
            return False
        self._tokens += len(token_ids)
        if end:
            self._end_pushed = True
            self._wake_reader()
            _wake(self._pusher)
            return False
        if self._whole or self._tokens == self._tokens_read:
            return False
        reader = self._reader
        if self._divert is not None and reader is not None and not reader.done():
            try:
                if self._divert():
                    return False
            except Exception as error:  # is this stream's, not that of those whose tokens came with it
                logger.exception("tokens could not be passed on")
                self.fail(InternalError(str(error)))
                return False
        self._wake_reader()
        return self._tokens - self._tokens_read >= WINDOW

    async def room(self) -> None:
        """See OutputStream."""
        while self.full:
            self._pusher = asyncio.get_running_loop().create_future()
            await self._pusher

    async def read(self) -> OutputChunk:
        """See OutputStream."""
        while not self._end_pushed and (self._whole or self._tokens == self._tokens_read):
            if self._error is not None:
                raise self._error
            self._reader = asyncio.get_running_loop().create_future()
            self.relay = self._relay
            await self._reader
        return self.take()

    def take(self) -> OutputChunk:
        """See OutputStream."""
        self._tokens_read = self._tokens
        _wake(self._pusher)
        return OutputChunk(Output(), self._tokens, self._end_pushed)

    def pass_on(self, relay: Relay) -> None:
        """From now on, single tokens that come while the reader waits may take ``relay``: the stream does not see those."""
        self._relay = relay

    def divert(self, take: Callable[[], bool]) -> None:
        """See OutputStream."""
        self._divert = take

    def fail(self, error: SapwoodError) -> None:
        """See OutputStream."""
        if not self.over:
            self._error = error
            self._wake_reader()
            _wake(self._pusher)

    def close(self) -> None:
        """See OutputStream."""
        self._closed, self._error = True, None
        self._divert = self._relay = self.relay = None
        _wake(self._pusher)

    def _wake_reader(self) -> None:
        self.relay = None
        _wake(self._reader)


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
