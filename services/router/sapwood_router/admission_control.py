"""Lets requests through to the workers as these have room, and queues them model by model while they have not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sapwood_common.errors import ResourceExhaustedError
from sapwood_router.admission import Admission, AdmissionSettings, Ticket
from sapwood_router.caller import Caller
from sapwood_router.registry import Registry

_POLL = 0.25
"""Seconds between looks at what changes by time alone: breakers that half-open, requests that waited too long."""


class AdmissionControl:
    """One for all requests. All on one event loop.

    Args:
        registry: Knows the workers; its ``on_room`` and changes are to lead to :meth:`pump`.
        settings: Bounds of each model's queue.
        clock: Seconds, monotonic: the one that deadlines are on.
    """

    def __init__(self, registry: Registry, settings: AdmissionSettings, clock: Callable[[], float]) -> None:
        self._registry = registry
        self._settings = settings
        self._clock = clock
        self._queues: dict[str, Admission] = {}
        self._let_go: dict[str, int] = {}

    @property
    def waiting(self) -> int:
        """Requests in all queues."""
        return sum(queue.waiting for queue in self._queues.values())

    def check(self, model: str, caller: Caller, deadline: float) -> None:
        """To be asked before anything is done for a request: whether :meth:`admit` would refuse it, as things stand.

        Raises:
            ResourceExhaustedError: As :meth:`admit`.
        """
        queue = self._queues.get(model)
        if queue is not None and queue.waiting:
            queue.check(caller.priority, deadline)

    async def admit(self, model: str, caller: Caller, cost: float, deadline: float) -> None:
        """Returns when the request may choose a worker, which it must do at once, without awaiting anything.

        If no worker is available at all it returns too: that is not for a queue to wait out.

        Args:
            model: Which workers it may go to.
            caller: Whose share it counts to, and how important it is.
            cost: Tokens to compute for it.
            deadline: When its client stops waiting.

        Raises:
            ResourceExhaustedError: It is refused.
        """
        queue = self._queues.get(model)
        if (queue is None or not queue.waiting) and self._has_room(model):
            return
        if queue is None:
            queue = self._queues[model] = Admission(self._settings, self._clock)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def go() -> None:
            if not turn.done():
                self._let_go[model] = self._let_go.get(model, 0) + 1
                turn.set_result(None)

        def refuse(error: ResourceExhaustedError) -> None:
            if not turn.done():
                turn.set_exception(error)

        ticket = Ticket(caller.tenant, caller.priority, cost, deadline, go, refuse, caller.weight)
        queue.enter(ticket)
        try:
            await turn
        finally:
            queue.leave(ticket)
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._let_go[model] -= 1

    def pump(self) -> None:
        """Workers have room, or there are others: lets go as many as fit."""
        for model, queue in self._queues.items():
            while queue.waiting and self._has_room(model) and queue.release():
                pass

    async def run(self) -> None:
        """Looks after the queues for ever; cancel it to stop."""
        while True:
            await asyncio.sleep(_POLL)
            for queue in self._queues.values():
                if queue.waiting:
                    queue.expire()
            self.pump()

    def _has_room(self, model: str) -> bool:
        taken = self._let_go.get(model, 0)
        room, any_admits = 0.0, False
        for worker in self._registry.available(model):
            if worker.breaker.admits():
                any_admits = True
                room += worker.room
                if room > taken:  # the first worker mostly has it
                    return True
        return not any_admits
