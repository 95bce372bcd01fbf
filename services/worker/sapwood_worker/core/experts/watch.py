"""Looks now and then at how a mixture of experts spreads its tokens."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from sapwood_worker.core.experts.balancer import ExpertBalancer
from sapwood_worker.core.observers import Observer
from sapwood_worker.ipc.messages import Step
from sapwood_worker.records.experts import ExpertLoad, ExpertMove, ExpertPlaces, expert_load
from sapwood_worker.records.step import Step as PlannedStep

_EVERY = 1.0
"""Seconds between two looks while there is work."""


class ExpertWatch(Observer):
    """Reports the load of experts when there is a new one.

    While there is work, what is asked is read a turn of the loop later, when the steps that it counts are over: so the device is
    not waited for.

    Args:
        ask: Asks for the tokens that each expert of each layer has got; what it returns waits for them.
        clock: Gives seconds.
        balancer: Moves experts between ranks by what is seen; None: ranks have no whole experts.
        exchanged: Gives the bytes that ranks have given each other for so many tokens that experts got.
    """

    def __init__(
        self,
        ask: Callable[[], Callable[[], list[list[int]]]],
        clock: Callable[[], float] = time.monotonic,
        balancer: ExpertBalancer | None = None,
        exchanged: Callable[[int], int] = lambda tokens: 0,
    ) -> None:
        self._ask, self._clock, self._balancer, self._exchanged = ask, clock, balancer, exchanged
        self._looked = clock() - _EVERY
        self._asked: Callable[[], list[list[int]]] | None = None
        self._told: ExpertLoad | None = None

    def planned(self, step: PlannedStep) -> None:
        step.moves = self.moves()

    def report(self, message: Step, *, idle: bool) -> bool:
        message.experts = self.take(idle=idle)
        return message.experts is not None

    def take(self, *, idle: bool) -> ExpertLoad | None:
        """The load, if it is another than the last that was given; looked at once a second, and when there is no more work.

        Args:
            idle: Whether there is nothing to compute.
        """
        now = self._clock()
        asked, self._asked = self._asked, None
        if idle:
            asked = self._ask()
        elif asked is None:
            if now >= self._looked + _EVERY:
                self._looked, self._asked = now, self._ask()
            return None
        totals = asked()
        load = expert_load(totals)
        if (balancer := self._balancer) is not None:
            balancer.see(totals)
            slots = tuple(map(tuple, balancer.slots))
            exchanged = self._exchanged(sum(load.tokens))
            places = ExpertPlaces(balancer.ranks, balancer.rank_balance, balancer.moves, exchanged, slots)
            load = msgspec.structs.replace(load, places=places)
        if load == self._told:
            return None
        self._told = load
        return load

    def moves(self) -> tuple[ExpertMove, ...]:
        """The experts that move before the next step, which is sure to be launched."""
        return () if self._balancer is None else self._balancer.take()
