"""One request's tokens on their way to output, as one stream of the shared detokenizer call."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from sapwood_common.errors import SapwoodError
from sapwood_router.request.output import Output, OutputBuffer, OutputOptions
from sapwood_router.request.output_stream import WINDOW, OutputChunk, OutputStream

_BATCH = 1024
"""Tokens that are written in one go where the answer is taken whole."""


class DetokenizeStream(OutputStream):
    """The session writes its tokens and delivers the output.

    Args:
        stream_id: Unique within the session.
        options: How its tokens become output.
        on_dirty: Called when there is something to write.
        on_close: Called once when the stream is closed before it ended.
        whole: The output is taken in one piece, at its end; it takes fewer messages.
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
        super().__init__(whole=whole)
        self.stream_id = stream_id
        self.options = options
        self._deferred = whole and not options.stop  # a stop string must be seen in time to stop the worker
        self.token_ids = array("I")
        """Everything pushed: what a lost session is replayed from."""
        self.end_pushed = False
        self.opened = False
        """Whether the current call knows the stream. The session writes this and the next two."""
        self.written = 0
        self.end_written = False
        self._on_dirty = on_dirty
        self._on_close = on_close
        self._output = OutputBuffer()
        self._stop_match: str | None = None
        self._reasoning_tokens = 0

    def push(self, token_ids: Sequence[int], *, end: bool = False) -> bool:
        if self.over or self.end_pushed:
            return False
        self.token_ids.extend(token_ids)
        self.end_pushed = end
        if end or not self._deferred or len(self.token_ids) - self.written >= _BATCH:
            self._on_dirty(self)
        return self._waiting_tokens() >= WINDOW and self.full

    def fail(self, error: SapwoodError) -> None:
        if not self.over:
            self._on_close(self)
            super().fail(error)

    def close(self) -> None:
        if not self.over:
            self._on_close(self)
        super().close()

    def deliver(
        self, output: Output, tokens: int, *, ended: bool, stop_match: str | None, reasoning_tokens: int = 0
    ) -> None:
        """Takes output from the session; what was delivered before a replay is dropped."""
        if self.over:
            return
        if not self._output.add(output) and tokens <= self._tokens and not ended:
            return
        self._tokens = max(self._tokens, tokens)
        self._ended = ended
        self._stop_match = stop_match
        self._reasoning_tokens = max(self._reasoning_tokens, reasoning_tokens)
        self._fresh = True
        self._tell()
        if ended:
            self._tell_pusher()

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
        self._tell_pusher()

    def rewind(self) -> None:
        """The call was lost: everything is to be written again, and the output delivered so far comes again."""
        self.opened = False
        self.end_written = False
        self.written = 0
        self._output.rewind()

    def _waiting_tokens(self) -> int:
        return max(len(self.token_ids) - self.written, self._tokens - self._tokens_taken)

    def _chunk(self) -> OutputChunk:
        return OutputChunk(self._output.take(), self._tokens, self._ended, self._stop_match, self._reasoning_tokens)
