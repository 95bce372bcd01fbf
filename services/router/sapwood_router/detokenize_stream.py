"""One request's tokens on their way to output, as one stream of the shared detokenizer call."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable, Sequence

from sapwood_common.errors import InternalError, SapwoodError
from sapwood_router.output import Output, OutputBuffer, OutputOptions
from sapwood_router.output_stream import WINDOW, OutputChunk, Relay

logger = logging.getLogger(__name__)

_BATCH = 1024
"""Tokens of an answer that is read whole that are written together."""


class DetokenizeStream:
    """An :class:`~sapwood_router.output_stream.OutputStream`; the session writes its tokens and delivers the output.

    What is read later is merged, so the stream holds at most the output of its own unread tokens; with :meth:`room` the
    pusher keeps those within a window.

    Args:
        stream_id: Unique within the session.
        options: How its tokens become output.
        on_dirty: Called when there is something to write.
        on_close: Called once when the stream is closed before it ended.
        whole: The output is read in one piece, at its end: fewer messages, and nothing holds the pusher back.
    """

    def __init__(
        self,
        stream_id: int,
        options: OutputOptions,
        on_dirty: Callable[[DetokenizeStream], None],
        on_close: Callable[[DetokenizeStream], None],
        *,
        whole: bool = False,
    ) -> None:
        self.stream_id = stream_id
        self.options = options
        self._whole = whole
        self._deferred = whole and not options.stop  # a stop string must be seen in time to stop the worker
        self.token_ids = array("I")
        """Everything pushed: what a lost session is replayed from."""
        self.end_pushed = False
        self.opened = False
        """Whether the current call knows the stream (the session's to set, like the next two)."""
        self.written = 0
        self.end_written = False
        self._on_dirty = on_dirty
        self._on_close = on_close
        self._output = OutputBuffer()
        self._tokens = 0
        self._tokens_read = 0
        self._fresh = False
        self._ended = False
        self._closed = False
        self._stop_match: str | None = None
        self._error: SapwoodError | None = None
        self._divert: Callable[[], bool] | None = None
        self._reader: asyncio.Future[None] | None = None
        self._pusher: asyncio.Future[None] | None = None

    @property
    def over(self) -> bool:
        """See OutputStream."""
        return self._ended or self._closed or self._error is not None

    def push(self, token_ids: Sequence[int], *, end: bool = False) -> bool:
        """See OutputStream."""
        if self.over or self.end_pushed:
            return False
        self.token_ids.extend(token_ids)
        self.end_pushed = end
        if end or not self._deferred or len(self.token_ids) - self.written >= _BATCH:
            self._on_dirty(self)
        return self.full

    @property
    def full(self) -> bool:
        """Whether WINDOW tokens or more wait to be written, or to be read."""
        return not (self.over or self._whole) and (
            len(self.token_ids) - self.written >= WINDOW or self._tokens - self._tokens_read >= WINDOW
        )

    async def room(self) -> None:
        """Returns once fewer than WINDOW tokens wait to be written and fewer than WINDOW to be read."""
        while self.full:
            self._pusher = asyncio.get_running_loop().create_future()
            await self._pusher

    @property
    def relay(self) -> Relay | None:
        """See OutputStream: every token is to become text."""
        return None

    async def read(self) -> OutputChunk:
        """See OutputStream."""
        while not self._fresh or (self._whole and not self._ended):
            if self._error is not None:
                raise self._error
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self.take()

    def take(self) -> OutputChunk:
        """See OutputStream."""
        chunk = OutputChunk(self._output.take(), self._tokens, self._ended, self._stop_match)
        self._fresh = False
        self._tokens_read = self._tokens
        self._wake_pusher()
        return chunk

    def divert(self, take: Callable[[], bool]) -> None:
        """See OutputStream."""
        self._divert = take

    def fail(self, error: SapwoodError) -> None:
        """See OutputStream."""
        if not self.over:
            self._error = error
            self._on_close(self)
            self._wake_reader()
            self._wake_pusher()

    def close(self) -> None:
        """See OutputStream."""
        if not self.over:
            self._on_close(self)
        self._closed, self._error = True, None
        self._divert = None
        self._wake_pusher()

    def deliver(self, output: Output, tokens: int, *, ended: bool, stop_match: str | None) -> None:
        """Takes output from the session; what was delivered before a replay is dropped."""
        if self.over:
            return
        if not self._output.add(output) and tokens <= self._tokens and not ended:
            return
        self._tokens = max(self._tokens, tokens)
        self._ended = ended
        self._stop_match = stop_match
        self._fresh = True
        if ended or not (self._whole or self._diverted()):
            self._wake_reader()
        if ended:
            self._wake_pusher()

    def attach(
        self,
        stream_id: int,
        on_dirty: Callable[[DetokenizeStream], None],
        on_close: Callable[[DetokenizeStream], None],
    ) -> None:
        """The stream goes on in another session."""
        self.stream_id = stream_id
        self._on_dirty = on_dirty
        self._on_close = on_close

    def wrote(self, upto: int) -> None:
        """The session wrote the first ``upto`` tokens."""
        self.written = upto
        self._wake_pusher()

    def rewind(self) -> None:
        """The call was lost: everything is to be written again, and the output delivered so far comes again."""
        self.opened = False
        self.end_written = False
        self.written = 0
        self._output.rewind()

    def _diverted(self) -> bool:
        if self._divert is None or self._reader is None or self._reader.done():
            return False
        try:
            return self._divert()
        except Exception as error:  # is this stream's, not that of those whose output came with it
            logger.exception("output could not be passed on")
            self.fail(InternalError(str(error)))
            return True

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _wake_pusher(self) -> None:
        if self._pusher is not None and not self._pusher.done():
            self._pusher.set_result(None)
