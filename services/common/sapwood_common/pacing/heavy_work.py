"""Spaces out work that takes the event loop many milliseconds in one piece: to parse 16 MB, or to write them.

One piece at a time has the loop, each caller's in turn, and all else then has several times as long before the next one.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable

LARGE = 256 * 1024
"""Bytes from which on it is worth waiting for a turn: smaller ones take less time than the wait costs."""
A_FEW = 32
"""Of many things of which each takes tens of microseconds, so many make a piece."""
_SHORT = 0.001
"""Seconds that a piece may take without a rest after it."""


class HeavyWork:
    """The heavy work of one event loop.

    Args:
        clock: Seconds, monotonic.
        rest: How many times as long as a piece took the loop rests from such work after it.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, *, rest: float = 3.0) -> None:
        self._clock = clock
        self._rest = rest
        self._began = 0.0
        self._busy = False
        """Whether a piece is being worked on, or the rest after it is not over."""
        self._waiting: OrderedDict[Hashable, deque[asyncio.Future[None]]] = OrderedDict()
        """By caller, the one first whose turn is next; none of them is empty."""

    @property
    def waiting(self) -> int:
        """Pieces that wait for their turn, those included that were given up since."""
        return sum(map(len, self._waiting.values()))

    async def turn(self, caller: Hashable = None) -> None:
        """Waits for a turn. The piece is what is done from then on until the first wait.

        Args:
            caller: Whose piece it is; callers take turns.
        """
        if not self._busy:
            self._begin()
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        await turn

    def _begin(self) -> None:
        self._busy = True
        self._began = self._clock()
        asyncio.get_running_loop().call_soon(self._over)

    def _over(self) -> None:
        took = self._clock() - self._began
        if took > _SHORT:
            asyncio.get_running_loop().call_later(self._rest * took, self._next)
        else:
            self._next()

    def _next(self) -> None:
        while self._waiting:
            caller, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[caller] = turns
            if not turn.done():
                turn.set_result(None)  # who waits goes on in the loop's next turn, before `_over`
                self._begin()
                return
        self._busy = False
