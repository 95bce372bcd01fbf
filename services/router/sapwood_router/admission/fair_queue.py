"""Requests that no worker has room for wait here, and are released in a fair order; those that would wait in vain are refused.

Order: strictly by priority class; within a class by start-time fair queueing over tenants (Goyal, Vin and Cheng, 1996): a
request's start tag is the later of the queue's virtual time and its tenant's last finish tag, its finish tag lies its cost
divided by the tenant's weight further on, the smallest start tag goes first and becomes the virtual time. So a tenant that
sends a thousand requests delays another's one request by at most one of its own, and who was idle has saved up nothing. A request
that takes its place before it is ready to go has a start tag as if it came when it is ready: those of a tenant that were long
prepared while others went would else all go before who comes then.

Refusal: when the queue is full, the request that would go last of all leaves, be it one that waits or the new one: so a tenant's
flood fills what room there is and no more than its share once others come. It is charged nothing. A request whose expected wait
(those that would go before it, over the rate at which requests have left lately) ends after its deadline, or is longer than
``most_wait``, is refused at once. A request can take its place before it is ready to go. All that are refused learn when to
try again: after the expected wait, at least a second, times a random factor from 1 to 2. Without the factor, those
who came together would come back together; spread out, a burst becomes a steady stream by its second try.

Complexity: O(log n) comparisons to enter, to go and to refuse, and a move of up to n pointers in a list; for a thousand
a microsecond is enough; those that are not ready are passed one by one. Bound: ``most_waiting`` requests, and the tags of four
times as many tenants in each class.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from sapwood_common.errors import ResourceExhaustedError
from sapwood_net.pacing.sliding_count import SlidingCount


class OverloadedError(ResourceExhaustedError):
    """A request is refused because the workers have too much to do."""


_RATE_WINDOW = 10.0
_LEAST_DELAY = 1.0


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
        cost: Tokens that count against its tenant's share.
        deadline: On the queue's clock.
        go: Called when it may go; never before :meth:`Admission.enter` returns.
        refuse: Called if it has to leave.
        weight: Its tenant's share, relative to others'.
        ready: Whether it may go when it is its turn; until then others go before it. :meth:`Admission.ready` sets it.
        latest: When going would be of no use any more: it is then refused.
    """

    tenant: str
    priority: int
    cost: float
    deadline: float
    go: Callable[[], None]
    refuse: Callable[[ResourceExhaustedError], None]
    weight: float = 1.0
    ready: bool = True
    latest: float = math.inf
    start: float = 0.0
    finish: float = 0.0
    number: int = 0
    entered: float = 0.0
    waiting: bool = False


class _Class:
    """One priority class: a fair queue over tenants.

    Args:
        most_idle: Tenants with nothing in it that it remembers; beyond, it forgets how much these had.
    """

    def __init__(self, most_idle: int) -> None:
        self._most_idle = most_idle
        self._virtual = 0.0
        self._finish: dict[str, float] = {}
        """Tenant -> finish tag of its last request that was ready."""
        self._coming: dict[str, float] = {}
        """Tenant -> finish tag of its last request that is not ready. It only says who would go last."""
        self.entries: list[tuple[float, int, Ticket]] = []
        """Start tag, number and ticket, in the order in which they go."""

    def start_of(self, tenant: str) -> float:
        """The start tag of a request that comes now and is not ready."""
        return max(self._virtual, self._finish.get(tenant, 0.0), self._coming.get(tenant, 0.0))

    def before(self, start: float) -> int:
        """How many go before a request that comes now with this start tag."""
        return bisect.bisect_left(self.entries, (start, math.inf))

    def add(self, ticket: Ticket) -> None:
        """Puts it at its place."""
        if len(self._finish) > len(self.entries) + self._most_idle:
            tenants = {each.tenant for _, _, each in self.entries}
            self._finish = {tenant: finish for tenant, finish in self._finish.items() if tenant in tenants}
        tenant = ticket.tenant
        if ticket.ready:
            ticket.start, finish = max(self._virtual, self._finish.get(tenant, 0.0)), self._finish
        else:
            ticket.start, finish = self.start_of(tenant), self._coming
        ticket.finish = finish[tenant] = ticket.start + ticket.cost / ticket.weight
        bisect.insort(self.entries, (ticket.start, ticket.number, ticket))

    def set_ready(self, ticket: Ticket) -> None:
        """It may go: it has the place of a request that comes now."""
        self.remove(ticket)
        ticket.ready = True
        self.add(ticket)

    def pop(self) -> Ticket | None:
        """Takes out the first that is ready."""
        for index, (start, _, ticket) in enumerate(self.entries):
            if ticket.ready:
                self._virtual = max(self._virtual, start)
                del self.entries[index]
                return ticket
        return None

    def take(self, ticket: Ticket) -> None:
        """Takes out one that goes, whether or not it is the first."""
        del self.entries[bisect.bisect_left(self.entries, (ticket.start, ticket.number))]

    def remove(self, ticket: Ticket) -> None:
        """Takes out one that does not go; if its tenant had none after it, nothing is charged for it."""
        self.take(ticket)
        if not ticket.ready:
            if self._coming.get(ticket.tenant) == ticket.finish:
                del self._coming[ticket.tenant]
        elif self._finish.get(ticket.tenant) == ticket.finish:
            self._finish[ticket.tenant] = ticket.start


class Admission:
    """The queue of one model.

    Args:
        settings: Its bounds.
        clock: Seconds, monotonic.
        rng: Spreads the times after which refused requests come again.
    """

    def __init__(self, settings: AdmissionSettings, clock: Callable[[], float], rng: random.Random) -> None:
        self._settings = settings
        self._clock = clock
        self._rng = rng
        self._classes: dict[int, _Class] = {}
        """Priority -> its class. A class without requests is not in it."""
        self._numbers = itertools.count()
        self._left = SlidingCount(_RATE_WINDOW, clock)
        self._busy_since: float | None = None
        self.waiting = 0
        """Requests in the queue."""

    @property
    def highest(self) -> int:
        """The highest priority that waits, if any does."""
        return max(self._classes)

    def enter(self, ticket: Ticket) -> None:
        """Puts a request at its place.

        Raises:
            ResourceExhaustedError: It is refused; ``retry_after`` says when to come again.
        """
        self.check(ticket.tenant, ticket.priority, min(ticket.deadline, ticket.latest))
        now = self._clock()
        if self._busy_since is None:
            self._busy_since = now
        if self.waiting >= self._settings.most_waiting:
            self._refuse(self._classes[min(self._classes)].entries[-1][2], "it made room for another")
        group = self._classes.get(ticket.priority)
        if group is None:
            group = self._classes[ticket.priority] = _Class(2 * self._settings.most_waiting)
        ticket.number, ticket.entered, ticket.waiting = next(self._numbers), now, True
        group.add(ticket)
        self.waiting += 1

    def check(self, tenant: str, priority: int, deadline: float) -> None:
        """Whether a request would be accepted now; changes nothing.

        Raises:
            ResourceExhaustedError: As :meth:`enter`.
        """
        settings = self._settings
        if not settings.most_waiting:
            raise self._refusal("all workers are busy, and no request may wait", 1.0)
        if not self.waiting:
            return
        group = self._classes.get(priority)
        start = 0.0 if group is None else group.start_of(tenant)
        wait = self._expected_wait(priority, 0 if group is None else group.before(start))
        if wait > settings.most_wait or self._clock() + wait > deadline:
            raise self._refusal(f"{self.waiting} requests wait, this one would for about {wait:.1f} s", wait)
        if self.waiting >= settings.most_waiting:
            lowest = min(self._classes)
            if priority < lowest or (priority == lowest and start >= self._classes[lowest].entries[-1][0]):
                raise self._refusal(f"{self.waiting} requests wait already", wait)

    def ready(self, ticket: Ticket) -> None:
        """A request is ready to go; does nothing for one that does not wait."""
        if ticket.waiting and not ticket.ready:
            self._classes[ticket.priority].set_ready(ticket)

    def leave(self, ticket: Ticket) -> None:
        """The request gives up waiting. May be called again, and for one that was let go."""
        if ticket.waiting:
            self._classes[ticket.priority].remove(ticket)
            self._gone(ticket)

    def release(self, chosen: Ticket | None = None, least: int | None = None) -> bool:
        """Lets the next request go, if one waits that is ready; or the one that is chosen, which does. ``least``: the lowest
        priority that may go."""
        if chosen is not None:
            self._classes[chosen.priority].take(chosen)
            self._let_go(chosen)
            return True
        for priority in sorted(self._classes, reverse=True):
            if least is not None and priority < least:
                return False
            ticket = self._classes[priority].pop()
            if ticket is not None:
                self._let_go(ticket)
                return True
        return False

    def _let_go(self, ticket: Ticket) -> None:
        self._gone(ticket)
        self._left.add()
        ticket.go()

    def expire(self) -> None:
        """Refuses those that waited too long; to be called now and then."""
        now, most = self._clock(), self._settings.most_wait
        waiting = [ticket for group in self._classes.values() for _, _, ticket in group.entries]
        for ticket in waiting:
            if ticket.entered < now - most:
                self._refuse(ticket, f"waited {most:g} s")
            elif ticket.latest < now:
                self._refuse(ticket, f"waited {now - ticket.entered:.2f} s, its objective cannot be met any more")

    def _expected_wait(self, priority: int, before: int) -> float:
        """Seconds that a request waits with ``before`` requests of its own class before it."""
        ahead = before + sum(len(group.entries) for key, group in self._classes.items() if key > priority)
        if not ahead or self._busy_since is None:
            return 0.0
        seconds = min(_RATE_WINDOW, max(1.0, self._clock() - self._busy_since))
        left = self._left.total()
        return ahead * seconds / left if left else 0.0

    def _refuse(self, ticket: Ticket, why: str) -> None:
        wait = self._expected_wait(ticket.priority, self._classes[ticket.priority].before(ticket.start))
        self.leave(ticket)
        ticket.refuse(self._refusal(why, wait))

    def _refusal(self, why: str, wait: float) -> OverloadedError:
        delay = max(_LEAST_DELAY, wait) * self._rng.uniform(1.0, 2.0)
        return OverloadedError(f"all workers are busy: {why}", retry_after=delay)

    def _gone(self, ticket: Ticket) -> None:
        ticket.waiting = False
        self.waiting -= 1
        if not self._classes[ticket.priority].entries:
            del self._classes[ticket.priority]  # idle: nobody has saved up or owes anything
        if not self.waiting:
            self._busy_since = None
