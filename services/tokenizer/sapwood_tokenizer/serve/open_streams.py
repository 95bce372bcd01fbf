"""How many Detokenize streams are open, in all calls together: bounds them, and lets draining wait for them."""

from __future__ import annotations

import asyncio

from sapwood_common.errors import ResourceExhaustedError


class OpenStreams:
    """Counts streams and the bytes of their options. Lives on one event loop.

    Args:
        most: The most streams that may be open at a time.
        most_option_bytes: The most bytes that the options of open streams may have together, as serialised.
    """

    def __init__(self, most: int, most_option_bytes: int) -> None:
        self._most = most
        self._most_option_bytes = most_option_bytes
        self._count = 0
        self._option_bytes = 0
        self._none = asyncio.Event()
        self._none.set()

    @property
    def count(self) -> int:
        """How many are open."""
        return self._count

    def opened(self, option_bytes: int) -> None:
        """Counts a stream that opens.

        Raises:
            ResourceExhaustedError: There would be too many; it is not counted.
        """
        if self._count >= self._most:
            raise ResourceExhaustedError(f"{self._most} streams are open, which is the most", retry_after=1.0)
        if self._option_bytes + option_bytes > self._most_option_bytes:
            raise ResourceExhaustedError("the options of the open streams take too much memory", retry_after=1.0)
        self._count += 1
        self._option_bytes += option_bytes
        self._none.clear()

    def closed(self, option_bytes: int) -> None:
        """Takes a stream that has ended, and the bytes of its options, out of the count."""
        self._count -= 1
        self._option_bytes -= option_bytes
        if self._count == 0:
            self._none.set()

    async def wait_until_none(self) -> None:
        """Returns once none is open."""
        await self._none.wait()
