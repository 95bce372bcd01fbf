"""Lets a few calls begin in each turn of the event loop: the more important first, and otherwise each caller's in turn.

Calls that come together would otherwise go in step: each turn takes the same stretch of every one, and the first is on its way
only when the last is, for writes leave at the end of a turn. With 256 at once and 0.3 ms each that is 75 ms for the first, and as
long for all that runs already. One callback a turn in which calls begin; O(log n) for one of n that have to wait.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Hashable

MOST_A_TURN = 8

Rank = tuple[int, Hashable]
"""Of a call that has to wait: its priority, and its caller."""


class Turnstile:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._begun = 0
        """In this turn."""
        self._waiting: list[tuple[int, int, int, Hashable, Callable[[], None]]] = []
        """A heap: priority with its sign turned, round, number, caller, what begins."""
        self._numbers = itertools.count()
        self._round = 0
        """Of the last that began after waiting."""
        self._next: dict[tuple[int, Hashable], int] = {}
        """The next round of each caller that waits, by priority."""

    @property
    def busy(self) -> bool:
        """Whether who enters now has to wait."""
        return self._begun >= MOST_A_TURN

    def enter(self, begin: Callable[[], None], priority: int = 0, caller: Hashable = None) -> None:
        """Calls ``begin``, which must not raise: now, or in a later turn.

        Args:
            begin: Begins the call.
            priority: Larger goes first among those that wait.
            caller: Whose it is: of two callers with the same priority, each begins one after one of the other's.
        """
        if self._begun == 0:
            asyncio.get_running_loop().call_soon(self._turn)
        if self._begun < MOST_A_TURN:
            self._begun += 1
            begin()
        else:
            turn = max(self._round, self._next.get((-priority, caller), 0))
            self._next[-priority, caller] = turn + 1
            heapq.heappush(self._waiting, (-priority, turn, next(self._numbers), caller, begin))

    def _turn(self) -> None:
        waiting = self._waiting
        self._begun = min(MOST_A_TURN, len(waiting))
        if self._begun:
            asyncio.get_running_loop().call_soon(self._turn)
        for _ in range(self._begun):
            rank, turn, _, caller, begin = heapq.heappop(waiting)
            self._round = max(self._round, turn)
            if self._next[rank, caller] == turn + 1:  # its last
                del self._next[rank, caller]
            begin()
