"""The parts of a request that was handed from worker to worker, one after the other, timed and traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

PairPart = Literal["prefill", "transfer", "decode"]


class Timed(Protocol):
    """What is timed from a beginning to an end."""

    def begin(self) -> None:
        """It begins."""
        ...

    def end(self) -> None:
        """It is over."""
        ...


class PairParts:
    """Follows the parts of a request, of which at most one is under way.

    Args:
        stage: Makes what times and traces a part.
    """

    def __init__(self, stage: Callable[[PairPart], Timed]) -> None:
        self._stage = stage
        self._now: Timed | None = None

    def begin(self, part: PairPart) -> None:
        """The one before is over and this begins."""
        self.end()
        self._now = self._stage(part)
        self._now.begin()

    def end(self) -> None:
        """What is under way, if anything is, is over."""
        now, self._now = self._now, None
        if now is not None:
            now.end()
