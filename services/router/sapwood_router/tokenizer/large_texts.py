"""Long texts are encoded one request at a time: while that lasts, each is in memory several times, and its tokens, too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sapwood_common.errors import DeadlineExceededError, ResourceExhaustedError

LARGE = 1024 * 1024
"""Characters of a request's texts from which on it is one of these."""
_MOST_WAITING = 2


class LargeTexts:
    """Whose turn it is."""

    def __init__(self) -> None:
        self._one = asyncio.Semaphore(1)
        self.waiting = 0
        """Requests that wait for their turn."""

    @asynccontextmanager
    async def turn(self, deadline: float) -> AsyncIterator[None]:
        """Waits for its turn, and has it as long as this is entered.

        Args:
            deadline: On the event loop's clock.

        Raises:
            ResourceExhaustedError: Too many wait already.
            DeadlineExceededError: It does not come in time.
        """
        if self.waiting >= _MOST_WAITING:
            raise ResourceExhaustedError(f"{self.waiting} other requests with long texts wait", retry_after=1.0)
        self.waiting += 1
        try:
            async with asyncio.timeout_at(deadline):
                await self._one.acquire()
        except TimeoutError:
            raise DeadlineExceededError("the deadline passed before the prompt was tokenized") from None
        finally:
            self.waiting -= 1
        try:
            yield
        finally:
            self._one.release()
