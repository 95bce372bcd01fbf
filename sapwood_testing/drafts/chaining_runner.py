"""A fake draft model that runs decodes one after another by itself, and whose tokens the host gets to know late."""

from __future__ import annotations

import numpy as np

from sapwood_testing.worker.fake_runner import FakeRunner
from sapwood_worker.records.step import IntArray, Step


class ChainingRunner(FakeRunner):
    """Implements :class:`~sapwood_worker.core.scheduler.speculation.model_drafter.ChainRunner`.

    Attributes:
        chained: Chains that were begun.
        awaited: Of how many of these the host has asked for the tokens.
    """

    chained = awaited = 0

    def launch_chain(self, first: Step, wanted: IntArray, reach: IntArray) -> KnownLater:
        assert (first.starts + first.counts + wanted <= reach).all(), "pages hold what is asked for"
        tokens = np.zeros((1 + int(wanted.max()), len(wanted)), np.int64)
        tokens[0] = [each[-1] for each in self.execute(first).token_ids]
        for place in range(len(tokens) - 1):
            parts = np.flatnonzero(wanted > place)
            ones, starts = np.ones(len(parts), np.int64), (first.starts + first.counts + place)[parts]
            step = Step(0, first.rows[parts], starts, ones, ones, tokens[place, parts], first.pages[parts])
            tokens[1 + place, parts] = [each[-1] for each in self.execute(step).token_ids]
        self.chained += 1
        return KnownLater(self, tokens.ravel())


class KnownLater:
    """Implements :class:`~sapwood_worker.records.step.LateTokens`."""

    def __init__(self, runner: ChainingRunner, tokens: IntArray) -> None:
        self._runner = runner
        self._tokens = tokens
        self._asked = False

    def wait(self) -> IntArray:
        self._runner.awaited += not self._asked
        self._asked = True
        return self._tokens

    def seconds(self) -> float:
        return 0.001
