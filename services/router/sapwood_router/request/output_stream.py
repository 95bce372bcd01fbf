"""A request's output on its way to the client: the worker's side pushes tokens, the request's run takes what becomes of them.

What is taken late is taken merged, so a stream holds at most the output of its own tokens; who pushes keeps those within WINDOW.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import msgspec

from sapwood_common.errors import SapwoodError
from sapwood_router.request.output import Output

WINDOW = 256
"""Tokens that may wait for the client, or for the tokenizer, before the worker's stream is read no further."""


class OutputChunk(msgspec.Struct):
    """Output that became certain.

    Attributes:
        output: What is new.
        tokens: How many of the stream's tokens were read for all output so far.
        ended: Nothing follows.
        stop_match: The stop string that ended the stream.
        reasoning_tokens: How many of the tokens are reasoning.
    """

    output: Output
    tokens: int
    ended: bool
    stop_match: str | None = None
    reasoning_tokens: int = 0


class OutputStream(ABC):
    """Tokens in, output out, all on one event loop.

    Args:
        whole: The output is taken in one piece, at its end: nothing holds the pusher back.
    """

    def __init__(self, *, whole: bool = False) -> None:
        self._whole = whole
        self._tokens = 0
        """How many tokens the output so far stands for."""
        self._tokens_taken = 0
        self._fresh = False
        """Whether there is output that nobody has taken."""
        self._ended = False
        self._closed = False
        self._error: SapwoodError | None = None
        self._listener: Callable[[], None] | None = None
        self._when_room: Callable[[], None] | None = None

    @property
    def over(self) -> bool:
        """Whether it ended, failed or was closed: what is pushed now goes nowhere."""
        return self._ended or self._closed or self._error is not None

    @property
    def full(self) -> bool:
        """Whether so much waits that nothing more should be pushed for now."""
        return not (self._whole or self.over) and self._waiting_tokens() >= WINDOW

    @property
    def ready(self) -> bool:
        """Whether :meth:`take` has something to give, or to raise."""
        return (self._fresh and not self._whole) or self._ended or self._error is not None

    @abstractmethod
    def push(self, token_ids: Sequence[int], *, end: bool = False) -> bool:
        """Hands over new tokens; ``end`` says that these were the last. Returns whether it is :attr:`full` now."""

    @abstractmethod
    def _waiting_tokens(self) -> int:
        """How many wait to be written, or for their output to be taken: the larger of both."""

    @abstractmethod
    def _chunk(self) -> OutputChunk:
        """What became certain since the last call."""

    def call_when_room(self, callback: Callable[[], None]) -> None:
        """Calls back, once, when it is no longer :attr:`full`; only while it is. A later callback replaces an earlier one."""
        self._when_room = callback

    def follow(self, listener: Callable[[], None]) -> None:
        """Calls ``listener``, which must not raise, whenever it becomes :attr:`ready` or has more."""
        self._listener = listener

    def take(self) -> OutputChunk:
        """All that became certain since the last call; only while :attr:`ready`.

        Raises:
            SapwoodError: The stream failed; what came before was taken, unless it is taken whole.
        """
        if self._error is not None and (self._whole or not self._fresh):
            raise self._error
        chunk = self._chunk()
        self._fresh = False
        self._tokens_taken = self._tokens
        self._tell_pusher()
        return chunk

    def fail(self, error: SapwoodError) -> None:
        """:meth:`take` raises ``error`` after what is there already; the first error counts."""
        if not self.over:
            self._error = error
            self._tell()
            self._tell_pusher()

    def close(self) -> None:
        """Nobody takes any more. May be called again."""
        self._closed, self._error = True, None
        self._listener = None
        self._tell_pusher()

    def _tell(self) -> None:
        """There is news for the listener."""
        if self._listener is not None and self.ready:
            self._listener()

    def _tell_pusher(self) -> None:
        if self._when_room is not None and not self.full:
            callback, self._when_room = self._when_room, None
            callback()
