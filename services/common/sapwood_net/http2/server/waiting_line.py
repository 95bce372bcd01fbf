"""The order in which calls that wait continue: those of high priority first, then each caller's in turn.

Every second place goes to a caller of whom none has gone on since it came: who has one call does not wait until each of a
thousand callers with many has had a turn. Of very many such callers the newest goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import NamedTuple

_FAIR = 8
"""New callers beyond which the newest begins first."""


class Rank(NamedTuple):
    """When a call begins that has to wait.

    Attributes:
        priority: Larger goes first.
        caller: Callers of the same priority take turns.
        stranger: Whether the caller had to show a key and has not: such callers wait in a line of their own.
        many: Whether the caller has many calls open, and counts as new no more: hundreds of those who flood may come while one
            with a single call waits, and would all go before him.
    """

    priority: int = 0
    caller: Hashable = None
    stranger: bool = False
    many: bool = False


class Place:
    """The place of a call that waits.

    Args:
        line: Where it waits.
        begin: Begins the call.
        rank: When it is its turn.
    """

    __slots__ = ("_line", "begin", "caller", "priority")

    def __init__(self, line: WaitingLine, begin: Callable[[], object], rank: Rank) -> None:
        self._line = line
        self.begin = begin
        self.priority = rank.priority
        self.caller = rank.caller

    def leave(self) -> None:
        """Gives up the place of a call that ended before it began. Does nothing for one that has begun."""
        self._line.drop(self)


class WaitingLine:
    """Calls that wait. O(1) for each that comes, begins or leaves."""

    def __init__(self) -> None:
        self._waiting: dict[int, OrderedDict[Hashable, OrderedDict[Place, None]]] = {}
        """Places by priority and caller, in the order of the callers' turns; no dictionary in it is empty."""
        self._new: dict[int, OrderedDict[Hashable, None]] = {}
        """Priority -> callers that wait for their first turn. They are in ``_waiting`` as well."""
        self._news_turn = False

    def __bool__(self) -> bool:
        """Whether a call waits."""
        return bool(self._waiting)

    def __len__(self) -> int:
        """How many calls wait."""
        return sum(len(places) for callers in self._waiting.values() for places in callers.values())

    def add(self, begin: Callable[[], object], rank: Rank) -> Place:
        """Adds a call behind those of its caller."""
        place = Place(self, begin, rank)
        callers = self._waiting.setdefault(rank.priority, OrderedDict())
        places = callers.get(rank.caller)
        if places is None:
            places = callers[rank.caller] = OrderedDict()
            self._new.setdefault(rank.priority, OrderedDict())[rank.caller] = None
        places[place] = None
        if rank.many:
            self._new[rank.priority].pop(rank.caller, None)
        return place

    def pop(self) -> Place:
        """Takes the one whose turn it is; there is one."""
        priority = max(self._waiting)
        caller = self._next_caller(priority)
        callers = self._waiting[priority]
        place, _ = callers[caller].popitem(last=False)
        callers.move_to_end(caller)
        self._tidy(priority, caller, had_turn=True)
        return place

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
            had_turn = True  # if this caller returns, it counts as new
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
