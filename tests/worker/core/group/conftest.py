"""What goes wrong on one rank alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sapwood_worker.model.runner.model_runner import ModelRunner
from sapwood_worker.records.step import Step

Work = Callable[[Any], object]


@pytest.fixture
def leader_failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Work], Work]:
    """Makes a leader's work fail: its own runner, and no other rank's, has no memory in step 3."""
    launch = ModelRunner.launch
    leaders: list[Any] = []

    def fail_in_the_leader(self: ModelRunner, step: Step) -> Any:
        if self in leaders and step.number == 3:
            raise MemoryError("no room here")
        return launch(self, step)

    def failing(work: Work) -> Work:
        def begin(runner: Any) -> object:
            leaders.append(runner._runner)
            return work(runner)

        return begin

    monkeypatch.setattr(ModelRunner, "launch", fail_in_the_leader)
    return failing
