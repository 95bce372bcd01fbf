"""Lets requests through to the workers as these have room, and queues them model by model while they have not.

Some places of each worker are for tenants who have few requests running: these begin at once, though a thousand requests of
another tenant have all other places, and wait. Among those who wait for a place of that kind who came first goes first. After
three of them the next in the queue's order goes: where there are more such tenants than places, all others would never go.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable

from sapwood_common.errors import ResourceExhaustedError
from sapwood_net.http2.server.turnstile import Turnstile
from sapwood_router.admission.fair_queue import Admission, AdmissionSettings, Ticket
from sapwood_router.fleet.registry import Registry
from sapwood_router.request.caller import Caller

_POLL = 0.25
"""Seconds between looks at what changes by time alone: breakers that half-open, requests that waited too long."""
_MOST_AHEAD = 3
"""Requests of tenants who have few running that go one after another while others wait."""


Floor = Callable[[str, int], int | None]
"""The lowest priority that may be given to a model's workers, if so many requests are about to be; None: any."""


def _no_floor(model: str, taken: int) -> int | None:
    """Any."""
    return None


def _nothing() -> None:
    """Counts work for a request that was released already, as part of the request's turn."""


class _Line:
    """The requests that are to choose a worker of one model.

    Attributes:
        queue: Who waits.
        exits: Lets a few go in each turn of the event loop: a message from a worker may make room for hundreds. Released
            requests wait for nothing else, so that they choose workers in the order of the queue.
        coming: Requests that are being prepared and have no place in the queue, for there was room when they came.
        let_go: Requests that left the queue and are about to choose a worker.
    """

    def __init__(self, model: str, registry: Registry, queue: Admission, exits: Turnstile, floor: Floor) -> None:
        self._model = model
        self._registry = registry
        self.queue = queue
        self._exits = exits
        self._floor = floor
        self.coming = 0
        self.let_go = 0
        self._let_go_of: dict[str, int] = {}
        """``let_go`` by tenant."""
        self._more = False
        """Whether more go in a later turn."""
        self._few: dict[Ticket, None] = {}
        """Waiting requests of tenants who have few requests running, in the order in which they came."""
        self._ahead = 0
        """How many requests of ``_few`` went since a request last went in the queue's order."""

    def has_room(self, taken: int, *, few: bool = False) -> bool:
        """Whether the workers have room for more than ``taken`` requests, or there are none.

        Args:
            taken: How many.
            few: Whether it is for a tenant who has few running: some places are kept for such.
        """
        room, any_admits = 0.0, False
        for worker in self._registry.available(self._model):
            breaker = worker.breaker
            if breaker.closed or breaker.admits():
                any_admits = True
                # A half-open breaker admits one probe only. If more requests were released, they would go to other workers,
                # which are full.
                free = worker.room if few else worker.open_room
                room += free if breaker.closed else min(1.0, free)
                if room > taken:  # the first worker mostly has it
                    return True
        return not any_admits

    def holds(self, priority: int, taken: int) -> bool:
        """Whether requests of this priority wait so that others' objectives are met, also if workers have room."""
        floor = self._floor(self._model, taken)
        return floor is not None and priority < floor

    def goes_ahead(self, caller: Caller, taken: int) -> bool:
        """Whether there is kept room for more than ``taken`` requests, and this one's tenant is the next who may have of it."""
        if self._next_few() is not None or (self.queue.waiting and self.queue.highest > caller.priority):
            return False
        return self._has_few(caller.tenant) and self.has_room(taken, few=True)

    def enter(self, ticket: Ticket) -> None:
        """A request is to wait. Raises ResourceExhaustedError: It is refused."""
        self.queue.enter(ticket)
        if self._has_few(ticket.tenant):
            self._few[ticket] = None

    def goes(self, tenant: str) -> None:
        """Notes that one of a tenant's requests is released."""
        self.let_go += 1
        self._let_go_of[tenant] = self._let_go_of.get(tenant, 0) + 1

    def went(self, tenant: str) -> None:
        """Notes that a released request chooses a worker now, or has given up."""
        self.let_go -= 1
        left = self._let_go_of[tenant] - 1
        if left:
            self._let_go_of[tenant] = left
        else:
            del self._let_go_of[tenant]

    def _has_few(self, tenant: str) -> bool:
        return self._registry.has_few(self._model, tenant, self._let_go_of.get(tenant, 0))

    def _next_few(self) -> Ticket | None:
        """The request that gets the next place of those kept for tenants with few requests; None: no request may."""
        for ticket in tuple(self._few):
            if not ticket.waiting or not self._has_few(ticket.tenant):
                del self._few[ticket]
            elif ticket.ready and ticket.priority == self.queue.highest:
                return ticket
        return None

    def pump(self) -> None:
        """Lets go as many as fit, a few a turn. No room is kept for requests that are still being prepared: that may take
        long."""
        while self.queue.waiting:
            floor = self._floor(self._model, self.let_go)
            if floor is not None and self.queue.highest < floor:
                return
            is_open = self.has_room(self.let_go)
            few = None if is_open or not self._few or not self.has_room(self.let_go, few=True) else self._next_few()
            if not is_open and few is None:
                return
            if self._exits.busy:
                if not self._more:
                    self._more = True
                    self._exits.enter(self._go_on)
                return
            if self._ahead == _MOST_AHEAD:
                few = None
            if not self.queue.release(few, floor):
                return
            self._ahead = 0 if few is None else self._ahead + 1
            self._exits.enter(_nothing)

    def _go_on(self) -> None:
        self._more = False
        self.pump()


class Place:
    """A request's place on its way to a worker, from before it is prepared until it chooses one. Anybody who has it calls
    :meth:`leave` in the end, whatever happens.

    Attributes:
        held: Whether it waits, or waited, so that others' objectives are met.
    """

    __slots__ = (
        "_caller",
        "_coming",
        "_cost",
        "_deadline",
        "_error",
        "_latest",
        "_let_go",
        "_line",
        "_ticket",
        "_turn",
        "held",
    )

    def __init__(self, line: _Line, caller: Caller, cost: float, deadline: float, latest: float) -> None:
        self._line = line
        self._caller = caller
        self._cost = cost
        self._deadline = deadline
        self._latest = latest
        self.held = False
        self._ticket: Ticket | None = None
        self._turn: asyncio.Future[None] | None = None
        self._let_go = False
        self._error: ResourceExhaustedError | None = None
        taken = line.coming + line.let_go
        has_room = (not line.queue.waiting and line.has_room(taken)) or line.goes_ahead(caller, taken)
        self._coming = has_room and not line.holds(caller.priority, taken)
        if self._coming:
            line.coming += 1
        else:
            self._enter(ready=False)

    def ready(self) -> bool:
        """The request is prepared. Whether it may choose a worker, which it must do at once, without awaiting anything; else it
        is to await :meth:`turn`. If no worker is available at all it may: that is not for a queue to wait out.

        Raises:
            ResourceExhaustedError: It was refused meanwhile, or is now.
        """
        if self._error is not None:
            raise self._error
        line = self._line
        if self._ticket is None:
            self.leave()
            has_room = line.has_room(line.let_go) or line.goes_ahead(self._caller, line.let_go)
            if has_room and not line.holds(self._caller.priority, line.let_go):  # it came before all that wait
                return True
            self._enter(ready=True)
            return False
        line.queue.ready(self._ticket)
        line.pump()
        if self._let_go:
            self.leave()
            return True
        return False

    async def turn(self) -> None:
        """Returns when the request may choose a worker, as :meth:`ready` says.

        Raises:
            ResourceExhaustedError: It is refused.
        """
        try:
            if self._error is not None:
                raise self._error
            if not self._let_go:
                self._turn = asyncio.get_running_loop().create_future()
                await self._turn
        finally:
            self.leave()

    def leave(self) -> None:
        """The request needs its place no longer. May be called again."""
        if self._coming:
            self._coming = False
            self._line.coming -= 1
        if self._let_go:
            self._let_go = False
            self._line.went(self._caller.tenant)
        if self._ticket is not None:
            self._line.queue.leave(self._ticket)

    def _enter(self, *, ready: bool) -> None:
        caller, line = self._caller, self._line
        self.held = line.holds(caller.priority, line.coming + line.let_go)
        ticket = Ticket(
            *(caller.tenant, caller.priority, self._cost, self._deadline, self._go, self._refuse, caller.weight),
            ready=ready,
            latest=self._latest,
        )
        line.enter(ticket)
        self._ticket = ticket

    def _go(self) -> None:
        if self._turn is None or not self._turn.done():
            self._let_go = True
            self._line.goes(self._caller.tenant)
            if self._turn is not None:
                self._turn.set_result(None)

    def _refuse(self, error: ResourceExhaustedError) -> None:
        self._error = error
        if self._turn is not None and not self._turn.done():
            self._turn.set_exception(error)


class AdmissionControl:
    """One for all requests. All on one event loop.

    Args:
        registry: Knows the workers; its ``on_room`` and changes are to lead to :meth:`pump`.
        settings: Bounds of each model's queue.
        clock: Seconds, monotonic: the one that deadlines are on.
        rng: Spreads the times after which refused requests come again.
        floor: Says which priorities may be given to workers.
    """

    def __init__(
        self,
        registry: Registry,
        settings: AdmissionSettings,
        clock: Callable[[], float],
        rng: random.Random,
        floor: Floor = _no_floor,
    ) -> None:
        self._floor = floor
        self._registry = registry
        self._settings = settings
        self._clock = clock
        self._rng = rng
        self._lines: dict[str, _Line] = {}
        self._exits = Turnstile()

    @property
    def waiting(self) -> int:
        """Requests in all queues."""
        return sum(line.queue.waiting for line in self._lines.values())

    def reserve(self, model: str, caller: Caller, cost: float, deadline: float, latest: float = math.inf) -> Place:
        """A place for a request that is yet to be prepared: what is refused costs nothing, also when many come at once.

        Args:
            model: Which workers it may go to; one that the registry knows.
            caller: Whose share it counts to, and how important it is.
            cost: Tokens to compute for it, about.
            deadline: When its client stops waiting.
            latest: When a place would be of no use any more.

        Raises:
            ResourceExhaustedError: It is refused.
        """
        line = self._lines.get(model)
        if line is None:
            queue = Admission(self._settings, self._clock, self._rng)
            line = self._lines[model] = _Line(model, self._registry, queue, self._exits, self._floor)
        return Place(line, caller, cost, deadline, latest)

    def pump(self) -> None:
        """Workers have room, or there are others: lets go as many as fit."""
        for line in self._lines.values():
            line.pump()

    async def run(self) -> None:
        """Looks after the queues for ever; cancel it to stop."""
        while True:
            await asyncio.sleep(_POLL)
            for line in self._lines.values():
                if line.queue.waiting:
                    line.queue.expire()
            self.pump()
