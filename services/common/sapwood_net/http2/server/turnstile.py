"""Lets a few calls begin in each turn of the event loop, in the order of :class:`WaitingLine`.

Callers who have shown a key have a line of their own, and every second place while others wait, too: who has opened hundreds of
connections without a key counts on each of them, and is worth no more than all callers with keys together.

Where turns take long there are fewer, since what else is done in them is done for others: who comes new waits for several turns.

Calls that come together would otherwise go in step: a turn does the same piece of work for every call, and what they write leaves
only at its end. With 256 calls at once and 0.3 ms each, the first waits 75 ms, and so do all calls that run already. The cost is
one callback in each turn in which calls begin, and O(1) for each call that waits or leaves.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from sapwood_net.http2.server.waiting_line import Place, Rank, WaitingLine

MOST_A_TURN, LEAST_A_TURN = 8, 2
LONG = 0.004
"""Seconds of a turn after which fewer begin in the next."""
_FIRST = Rank()


class Turnstile:
    """Lets calls begin on one event loop.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._most = MOST_A_TURN
        self._since = 0.0
        """When this turn's first began."""
        self._begun = 0
        """Calls that have begun in this turn."""
        self._known, self._strangers = WaitingLine(), WaitingLine()
        self._strangers_turn = False

    @property
    def busy(self) -> bool:
        """Whether a call that enters now has to wait."""
        return self._begun >= self._most

    @property
    def waiting(self) -> int:
        """Calls that wait."""
        return len(self._known) + len(self._strangers)

    def enter(self, begin: Callable[[], object], rank: Rank = _FIRST) -> Place | None:
        """Calls ``begin``, which must not raise: now, or in a later turn.

        Args:
            begin: Begins the call.
            rank: When it begins if it has to wait.

        Returns:
            Its place if it has to wait.
        """
        if self._begun == 0:
            self._since = self._clock()
            asyncio.get_running_loop().call_soon(self._turn)
        if self._begun < self._most:
            self._begun += 1
            begin()
            return None
        return (self._strangers if rank.stranger else self._known).add(begin, rank)

    async def wait(self, rank: Rank = _FIRST) -> None:
        """Waits for a turn, which may come at once."""
        turn = asyncio.Event()
        place = self.enter(turn.set, rank)
        try:
            await turn.wait()
        finally:
            if place is not None:
                place.leave()

    def _next(self) -> Place | None:
        """The call whose turn it is; None if none waits."""
        if self._known and self._strangers:
            self._strangers_turn = not self._strangers_turn
            return (self._strangers if self._strangers_turn else self._known).pop()
        line = self._known or self._strangers
        return line.pop() if line else None

    def _turn(self) -> None:
        now = self._clock()
        self._most = LEAST_A_TURN if now - self._since > LONG else min(self._most + 1, MOST_A_TURN)
        self._since = now
        self._begun = 0
        while self._begun < self._most and (place := self._next()) is not None:
            if self._begun == 0:
                asyncio.get_running_loop().call_soon(self._turn)
            self._begun += 1
            place.begin()
