"""A worker without a model, on a clock of its own: what steps cost and how often drafts are right is given."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from sapwood_common.contract.sampling import SamplingParams
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.results import accept_drafts
from sapwood_worker.core.scheduler.speculation.costs import StepCosts
from sapwood_worker.core.scheduler.speculation.speculation import MOST_DRAFTED, Speculation
from sapwood_worker.core.scheduler.waiting import TenantFairness
from sapwood_worker.records.step import LateTokens, ModelOutput


class VirtualRow:
    """Implements :class:`~sapwood_worker.core.scheduler.request.RowDrafter`: guesses are right by chance.

    Args:
        chance: Decides.
        right: The chance, by the number of the token.
        computes: Whether it learns of what was drafted alone.
        looked: Called when it is asked.
    """

    def __init__(
        self, chance: random.Random, right: Callable[[int], float], looked: Callable[[], None], *, computes: bool
    ) -> None:
        self._chance = chance
        self._right = right
        self._looked = looked
        self._computes = computes
        self._flags: list[bool] = []
        self._at = 0
        self._seen = (0, 0)

    def run(self, drafted: int) -> int:
        """How many of so many drafted tokens are right; the request continues behind them, and one further."""
        while len(self._flags) <= self._at + drafted:
            self._flags.append(self._chance.random() < self._right(len(self._flags)))
        flags = self._flags[self._at : self._at + drafted + 1]
        got = flags.index(False) if False in flags[:drafted] else drafted
        right, wrong = got, int(got < drafted)
        if not self._computes:  # its guess for the token after is known too
            right, wrong = got + flags[got], int(not flags[got])
        self._seen = self._seen[0] + right, self._seen[1] + wrong
        self._at += got + 1
        return got

    def follow(self) -> tuple[int, int]:
        seen, self._seen = self._seen, (0, 0)
        return seen

    def propose(self, unknown: int, most: int) -> list[int]:
        self._looked()
        return [7] * most


class VirtualWorker:
    """Runs requests that never end; is their drafter, too.

    Args:
        rows: The requests.
        right: The chance that a drafted token is right, by request and number of the token.
        cost: Seconds of a step, by its sampled positions.
        depth: Seconds that each token of the longest draft takes; 0: it need not be computed.
        switch: Seconds that the first step after one with drafts takes longer.
        look: Seconds that it takes the host to look at a request's drafts.
        noise: Durations differ by up to so much of themselves.
        positions: Most sampled positions of a step.
        seed: Of chance.
    """

    name = "virtual"
    caught_up = 0
    late: LateTokens | None = None

    def __init__(
        self,
        rows: int,
        right: Callable[[int, int], float],
        cost: Callable[[int], float],
        *,
        depth: float = 0.0,
        switch: float = 0.0,
        look: float = 0.0,
        noise: float = 0.0,
        positions: int = 64,
        seed: int = 0,
    ) -> None:
        self.computes = depth > 0
        self.drafted = 0
        self._cost = cost
        self._depth = depth
        self._switch = switch
        self._look = look
        self._noise = noise
        self._positions = positions
        self._chance = random.Random(seed)
        self._fairness = TenantFairness()
        self._fairness.arrived("")
        self._seconds = 0.0
        self._drafting = False
        sampling = SamplingParams(max_tokens=10**7)
        self._requests = [Request(serial, str(serial), [1, 2], sampling) for serial in range(rows)]
        self._rows = [
            VirtualRow(self._chance, lambda at, own=own: right(own, at), self._looked, computes=self.computes)  # type: ignore[misc]
            for own in range(rows)
        ]
        self._speculation = Speculation(
            self, positions, StepCosts(), lambda request, count: count, lambda: self._seconds
        )

    def begin(self, request: Request) -> VirtualRow:
        return self._rows[request.serial]

    def behind(self, request: Request) -> int:
        """Nothing."""
        return 0

    def fill(self, decodes: Sequence[Request], drafts: list[list[int]]) -> list[list[int]]:
        """Returns the drafts unchanged, after some time."""
        self._seconds += self._depth * max(map(len, drafts))
        return drafts

    def settle(self) -> float:
        """Nothing is late."""
        return 0.0

    def run(self, steps: int) -> float:
        """Tokens a second of so many further steps."""
        before, tokens = self._seconds, 0
        for number in range(steps):
            drafts = self._speculation.plan(self._requests) or [[] for _ in self._requests]
            lengths = [len(draft) for draft in drafts]
            seconds = self._cost(len(drafts) + sum(lengths)) + (self._switch if self._drafting else 0.0)
            self._drafting = any(lengths)
            self._seconds += seconds * (1 + self._noise * self._chance.uniform(-1, 1))
            output = []
            for request, row, length in zip(self._requests, self._rows, lengths, strict=True):
                output.append([7] * (row.run(length) + 1))
                request.token_ids.extend(output[-1])
            tokens += sum(map(len, output))
            self.drafted += sum(lengths)
            plan = SimpleNamespace(token_ids=[0] * (len(drafts) + sum(lengths)))
            step: Any = SimpleNamespace(decodes=self._requests, drafts=drafts, chunks=[], plan=plan)
            step.drafts = drafts if any(lengths) else []
            answer = ModelOutput(number, output)
            self._speculation.settle(step, answer)
            accept_drafts(step, answer, self._fairness)
            self._speculation.took(step, answer, self._seconds)
        return tokens / (self._seconds - before)

    def off(self) -> float:
        """Tokens a second without drafts."""
        rows = len(self._requests)
        return rows / self._cost(rows)

    def best(self, right: float) -> float:
        """The most tokens a second that drafts of one length bring, if all tokens are right with the same chance."""
        rows, found = len(self._requests), []
        for length in range(min(MOST_DRAFTED, self._positions // rows - 1) + 1):
            brought = rows * sum(right**place for place in range(length + 1))
            seconds = self._cost(rows * (1 + length)) + length * self._depth
            found.append(brought / (seconds + (self._switch + rows * self._look if length else 0.0)))
        return max(found)

    def _looked(self) -> None:
        self._seconds += self._look
