"""Requests that no worker has room for wait here, and are let go in a fair order; those that would wait in vain are refused.

Order: strictly by priority class; within a class by start-time fair queueing over tenants (Goyal, Vin and Cheng, 1996): a
request's start tag is the later of the queue's virtual time and its tenant's last finish tag, its finish tag lies its cost
divided by the tenant's weight further on, the smallest start tag goes first and becomes the virtual time. So a tenant that
sends a thousand requests delays another's one request by at most one of its own, and who was idle has saved up nothing.

Refusal: when the queue is full, the least important and latest request in it goes if the new one is more important, else the
new one. A request whose expected wait (requests before it over the rate at which they have left lately) ends after its
deadline, or is longer than ``most_wait``, is refused at once, with the time after which to try again.

Complexity: O(log n) to enter and to go, O(n) to refuse for another. Bound: ``most_waiting`` requests.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

from sapwood_common.errors import ResourceExhaustedError
from sapwood_router.sliding_count import SlidingCount

_RATE_WINDOW = 10.0


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """Bounds and shares.

    Attributes:
        most_waiting: Requests that may wait.
        most_wait: Seconds that one may wait.
    """

    most_waiting: int = 1024
    most_wait: float = 30.0


@dataclass(slots=True, eq=False)
class Ticket:
    """A request's place in the queue.

    Attributes:
        tenant: Whose it is.
        priority: Larger goes first.
        cost: What it counts against its tenant's share, in tokens.
        deadline: On the queue's clock.
        go: Called when it may go; never before :meth:`Admission.enter` returns.
        refuse: Called if it has to leave.
        weight: Its tenant's share, relative to others'.
    """

    tenant: str
    priority: int
    cost: float
    deadline: float
    go: Callable[[], None]
    refuse: Callable[[ResourceExhaustedError], None]
    weight: float = 1.0
    start: float = 0.0
    finish: float = 0.0
    entered: float = 0.0
    waiting: bool = False


class _Class:
    """One priority class: a fair queue over tenants."""

    def __init__(self) -> None:
        self.virtual = 0.0
        self.finish: dict[str, float] = {}
        self.heap: list[tuple[float, int, Ticket]] = []
        self.waiting = 0


class Admission:
    """The queue of one model.

    Args:
        settings: Its bounds.
        clock: Seconds, monotonic.
    """

    def __init__(self, settings: AdmissionSettings, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self._classes: dict[int, _Class] = {}
        self._order = itertools.count()
        self._left = SlidingCount(_RATE_WINDOW, clock)
        self._busy_since: float | None = None
        self.waiting = 0
        """Requests in the queue."""

    def enter(self, ticket: Ticket) -> None:
        """Puts a request at its place.

        Raises:
            ResourceExhaustedError: It is refused; ``retry_after`` says when to come again.
        """
        now = self._clock()
        if self._busy_since is None:
            self._busy_since = now
        self.check(ticket.priority, ticket.deadline)
        if self.waiting >= self._settings.most_waiting:
            self._make_room()
        group = self._classes.setdefault(ticket.priority, _Class())
        ticket.start = max(group.virtual, group.finish.get(ticket.tenant, 0.0))
        ticket.finish = ticket.start + ticket.cost / ticket.weight
        ticket.entered = now
        ticket.waiting = True
        group.finish[ticket.tenant] = ticket.finish
        heapq.heappush(group.heap, (ticket.start, next(self._order), ticket))
        group.waiting += 1
        self.waiting += 1

    def check(self, priority: int, deadline: float) -> None:
        """Whether a request would be let in now; changes nothing.

        Raises:
            ResourceExhaustedError: As :meth:`enter`.
        """
        settings = self._settings
        wait = self._expected_wait(priority)
        if wait > settings.most_wait or self._clock() + wait > deadline:
            raise ResourceExhaustedError(
                f"all workers are busy: {self.waiting} requests wait, for about {wait:.1f} s",
                retry_after=max(1.0, wait),
            )
        if self.waiting >= settings.most_waiting and self._least_important() >= priority:
            raise ResourceExhaustedError(
                f"all workers are busy and {self.waiting} requests wait already", retry_after=max(1.0, wait)
            )

    def leave(self, ticket: Ticket) -> None:
        """The request gives up waiting. May be called again, and for one that was let go."""
        if ticket.waiting:
            self._remove(ticket)

    def release(self) -> bool:
        """Lets the next request go, if one waits."""
        for priority in sorted(self._classes, reverse=True):
            group = self._classes[priority]
            while group.heap:
                start, _, ticket = heapq.heappop(group.heap)
                if not ticket.waiting:
                    continue
                group.virtual = start
                self._remove(ticket)
                self._left.add()
                ticket.go()
                return True
        return False

    def expire(self) -> None:
        """Refuses those that waited too long; to be called now and then."""
        limit = self._clock() - self._settings.most_wait
        late = [
            ticket
            for group in self._classes.values()
            for _, _, ticket in group.heap
            if ticket.waiting and ticket.entered < limit
        ]
        for ticket in late:
            self._refuse(ticket, f"waited {self._settings.most_wait:g} s")

    def _expected_wait(self, priority: int) -> float:
        ahead = sum(group.waiting for key, group in self._classes.items() if key >= priority)
        if not ahead or self._busy_since is None:
            return 0.0
        seconds = min(_RATE_WINDOW, max(1.0, self._clock() - self._busy_since))
        left = self._left.total()
        return ahead * seconds / left if left else 0.0

    def _least_important(self) -> float:
        return min((key for key, group in self._classes.items() if group.waiting), default=math.inf)

    def _make_room(self) -> None:
        lowest = min(key for key, group in self._classes.items() if group.waiting)
        last = max((item for item in self._classes[lowest].heap if item[2].waiting), key=lambda item: item[:2])
        self._refuse(last[2], "made room for a more important request")

    def _refuse(self, ticket: Ticket, why: str) -> None:
        wait = self._expected_wait(ticket.priority)
        self._remove(ticket)
        ticket.refuse(ResourceExhaustedError(f"all workers are busy: {why}", retry_after=max(1.0, wait)))

    def _remove(self, ticket: Ticket) -> None:
        ticket.waiting = False
        group = self._classes[ticket.priority]
        group.waiting -= 1
        self.waiting -= 1
        if not group.waiting:
            del self._classes[ticket.priority]  # idle: nobody has saved up or owes anything
        if not self.waiting:
            self._busy_since = None
