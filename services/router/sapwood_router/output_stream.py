"""A request's output on its way to the client: what the worker's side fills and the client's side reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from sapwood_common.errors import SapwoodError
from sapwood_router.output import Output

WINDOW = 256
"""Tokens that may wait for the client, or for the tokenizer, before the worker's stream is read no further."""


class OutputChunk(msgspec.Struct):
    """Output that became certain.

    Attributes:
        output: What is new.
        tokens: How many of the stream's tokens were read for all output so far.
        ended: Nothing follows.
        stop_match: The stop string that ended the stream.
    """

    output: Output
    tokens: int
    ended: bool
    stop_match: str | None = None


Relay = Callable[[int], bool]
"""Sends a token to the client at once and keeps account of it, or says no. Must not raise."""


class OutputStream(Protocol):
    """Tokens in, output out. One side pushes, one task reads, on one event loop; what is read later is merged."""

    @property
    def relay(self) -> Relay | None:
        """Where the pusher may take a single token instead of pushing it, as things stand."""
        ...

    @property
    def over(self) -> bool:
        """Whether it ended, failed or was closed: what is pushed now goes nowhere."""
        ...

    @property
    def full(self) -> bool:
        """Whether so much waits that nothing more should be pushed for now."""
        ...

    def push(self, token_ids: Sequence[int], *, end: bool = False) -> bool:
        """Hands over new tokens; ``end`` says that these were the last. Returns whether it is :attr:`full` now."""
        ...

    async def room(self) -> None:
        """Returns once it is not :attr:`full`."""
        ...

    async def read(self) -> OutputChunk:
        """All that became certain since the last call; waits for something.

        Raises:
            SapwoodError: The stream failed; what came before was read.
        """
        ...

    def take(self) -> OutputChunk:
        """The same, of what is there."""
        ...

    def divert(self, take: Callable[[], bool]) -> None:
        """Calls ``take`` for new output, except the last, instead of waking who waits in :meth:`read`.

        Args:
            take: Calls :meth:`take` and returns True, or returns False: then the reader is woken.
        """
        ...

    def fail(self, error: SapwoodError) -> None:
        """:meth:`read` raises ``error`` after what is there already; the first error counts."""
        ...

    def close(self) -> None:
        """Nobody reads on. May be called again."""
        ...
