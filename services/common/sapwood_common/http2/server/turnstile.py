"""Lets a few calls begin in each turn of the event loop: those of high priority first, then each caller's in turn.

Every second place goes to a caller of whom none has begun since it came: who has one call does not wait until each of a thousand
callers with many has had a turn. Of very many such callers the newest goes first.

Where turns take long there are fewer, since what else is done in them is done for others: who comes new waits for several turns.

Calls that come together would otherwise go in step: a turn does the same piece of work for every call, and what they write leaves
only at its end. With 256 calls at once and 0.3 ms each, the first waits 75 ms, and so do all calls that run already. The cost is
one callback in each turn in which calls begin, and O(1) for each call that waits or leaves.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable

MOST_A_TURN, LEAST_A_TURN = 8, 2
LONG = 0.004
"""Seconds of a turn after which fewer begin in the next."""
_FAIR = 8
"""New callers beyond which the newest begins first."""

Rank = tuple[int, Hashable]
"""The priority and the caller of a call that has to wait."""


class Place:
    """The place of a call that waits.

    Args:
        turnstile: Where it waits.
        begin: Begins the call.
        priority: Larger goes first.
        caller: Callers of the same priority take turns.
    """

    __slots__ = ("_turnstile", "begin", "caller", "priority")

    def __init__(self, turnstile: Turnstile, begin: Callable[[], object], priority: int, caller: Hashable) -> None:
        self._turnstile = turnstile
        self.begin = begin
        self.priority = priority
        self.caller = caller

    def leave(self) -> None:
        """Gives up the place of a call that ended before it began. Does nothing for one that has begun."""
        self._turnstile.drop(self)


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
        self._waiting: dict[int, OrderedDict[Hashable, OrderedDict[Place, None]]] = {}
        """Places by priority and caller, in the order of the callers' turns; no dictionary in it is empty."""
        self._new: dict[int, OrderedDict[Hashable, None]] = {}
        """By priority the callers that wait for their first turn; they have their place among the others, too."""
        self._news_turn = False

    @property
    def busy(self) -> bool:
        """Whether a call that enters now has to wait."""
        return self._begun >= self._most

    @property
    def waiting(self) -> int:
        """Calls that wait."""
        return sum(len(places) for callers in self._waiting.values() for places in callers.values())

    def enter(self, begin: Callable[[], object], priority: int = 0, caller: Hashable = None) -> Place | None:
        """Calls ``begin``, which must not raise: now, or in a later turn.

        Args:
            begin: Begins the call.
            priority: Larger goes first among those that wait.
            caller: Callers of the same priority take turns, one call each.

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
        place = Place(self, begin, priority, caller)
        callers = self._waiting.setdefault(priority, OrderedDict())
        places = callers.get(caller)
        if places is None:
            places = callers[caller] = OrderedDict()
            self._new.setdefault(priority, OrderedDict())[caller] = None
        places[place] = None
        return place

    async def wait(self) -> None:
        """Waits for a turn, which may come at once."""
        turn = asyncio.Event()
        place = self.enter(turn.set)
        try:
            await turn.wait()
        finally:
            if place is not None:
                place.leave()

    def drop(self, place: Place) -> None:
        """Gives up a place; :meth:`Place.leave` calls it."""
        callers = self._waiting.get(place.priority)
        places = None if callers is None else callers.get(place.caller)
        if places is not None and place in places:
            del places[place]
            self._tidy(place.priority, place.caller)

    def _tidy(self, priority: int, caller: Hashable, *, had_turn: bool = False) -> None:
        callers, new = self._waiting[priority], self._new[priority]
        if not callers[caller]:
            del callers[caller]
            had_turn = True  # it comes as new, if it comes again
        if had_turn:
            new.pop(caller, None)
        if not callers:
            del self._waiting[priority], self._new[priority]

    def _next_caller(self, priority: int) -> Hashable:
        callers, new = self._waiting[priority], self._new[priority]
        self._news_turn = not self._news_turn
        if not self._news_turn or not new:
            return next(iter(callers))
        return next(reversed(new)) if len(new) > _FAIR else next(iter(new))

    def _turn(self) -> None:
        now = self._clock()
        self._most = LEAST_A_TURN if now - self._since > LONG else min(self._most + 1, MOST_A_TURN)
        self._since = now
        self._begun = 0
        while self._waiting and self._begun < self._most:
            if self._begun == 0:
                asyncio.get_running_loop().call_soon(self._turn)
            self._begun += 1
            priority = max(self._waiting)
            caller = self._next_caller(priority)
            callers = self._waiting[priority]
            place, _ = callers[caller].popitem(last=False)
            callers.move_to_end(caller)
            self._tidy(priority, caller, had_turn=True)
            place.begin()
