"""Cuts long work into pieces: others continue after so much of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable


class Pace:
    """The pace of one piece of work.

    Args:
        breathe: Lets others continue.
        most: How much is done before that.
    """

    def __init__(self, breathe: Callable[[], Awaitable[None]], most: int) -> None:
        self._breathe = breathe
        self._most = most
        self._done = 0

    async def did(self, count: int = 1) -> None:
        """Notes that so much was done, and waits if that was enough for now."""
        self._done += count
        if self._done >= self._most:
            self._done = 0
            await self._breathe()
