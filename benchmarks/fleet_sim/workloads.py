"""What is asked: prompts of token ids and when each comes. Arrivals are open: they do not wait for answers to others."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class Ask:
    """A request; ``done`` is called with its answer's end, and a conversation then continues."""

    tokens: list[int]
    answer: list[int]
    session: str
    done: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Workload:
    """Tokens of each part. With several turns, a conversation continues ``think`` seconds after an answer, on average.

    Attributes:
        systems: How many system prompts there are, asked for by Zipf's law; 0: none.
    """

    name: str
    systems: int
    system: int
    user: int
    answer: int
    turns: int = 1
    think: float = 0.0


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("shared", systems=200, system=1024, user=256, answer=32),
        Workload("turns", systems=20, system=512, user=160, answer=32, turns=5, think=0.1),
        Workload("agents", systems=4, system=2048, user=2560, answer=64, turns=30, think=3.0),
        Workload("random", systems=0, system=0, user=1024, answer=32),
    )
}


class Source:
    """Makes requests of a workload: ``submit`` gets each, ``after`` calls something later."""

    def __init__(
        self,
        workload: Workload,
        rate: float,
        until: float,
        seed: str,
        after: Callable[[float, Callable[[], None]], None],
        now: Callable[[], float],
        submit: Callable[[Ask], None],
    ) -> None:
        self._workload = workload
        self._rate = rate / workload.turns
        self._until = until
        self._rng = random.Random(seed)
        self._after, self._now, self._submit = after, now, submit
        self._systems = [self._some(workload.system) for _ in range(workload.systems)]
        zipf = [1 / (rank + 1) for rank in range(workload.systems)]
        self._shares = [sum(zipf[: i + 1]) for i in range(len(zipf))]
        self._serial = 0

    def start(self, answer_seconds: float) -> None:
        """Begins with as many conversations in each turn as there are later on; nobody holds what they said so far.

        Args:
            answer_seconds: How long an answer takes, about.
        """
        self._after(self._rng.expovariate(self._rate), self._arrive)
        cycle = self._workload.think + answer_seconds
        for left in range(1, self._workload.turns):
            for _ in range(round(self._rate * cycle)):
                self._after(self._rng.random() * cycle, lambda left=left: self._begin(left))

    def _arrive(self) -> None:
        if self._now() >= self._until:
            return
        self._after(self._rng.expovariate(self._rate), self._arrive)
        self._begin(self._workload.turns)

    def _begin(self, left: int) -> None:
        """A conversation with so many turns to go."""
        workload = self._workload
        self._serial += 1
        system = self._rng.choices(self._systems, cum_weights=self._shares)[0] if self._systems else []
        said = self._some((workload.turns - left) * (workload.user + workload.answer))
        self._turn(f"c{self._serial}", system + said, left)

    def _turn(self, session: str, talk: list[int], left: int) -> None:
        workload = self._workload
        answer = self._some(workload.answer)
        tokens = talk + self._some(workload.user)

        def done() -> None:
            if left > 1 and self._now() < self._until:
                think = self._rng.expovariate(1 / workload.think)
                self._after(think, lambda: self._turn(session, tokens + answer, left - 1))

        self._submit(Ask(tokens, answer, session, done))

    def _some(self, length: int) -> list[int]:
        raw = self._rng.randbytes(2 * length)
        return [raw[i] << 8 | raw[i + 1] for i in range(0, 2 * length, 2)]
