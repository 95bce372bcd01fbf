"""Steps of which a stage of a pipeline has launched its layers, but not yet what follows the last stage.

What the last stage gives of a step is waited for on the queue that computes. So the layers of later steps come before it there,
as many as there are stages after this one, which compute them meanwhile. No stage waits for another in a circle so: an earlier
stage defers no less than a later one, whose layers need its own. No step comes before one that samples a token which it computes,
and that the host does not know.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sapwood_worker.records.step import DeferredStep, IntArray, LaunchedStep, Step


class DeferredSteps:
    """The steps, in the order of their launch.

    Args:
        after: Stages after this one. With the step that is being launched, at most one more is deferred.

    Attributes:
        overtaken: Steps whose rest was launched after the layers of a later one: as often, two were under way in the pipeline.
    """

    def __init__(self, after: int) -> None:
        self.overtaken = 0
        self._most = after
        self._waiting: list[tuple[DeferredStep, IntArray]] = []

    def make_way(self, step: Step) -> None:
        """Finishes what has to come before a step's layers."""
        self._waiting = [each for each in self._waiting if not each[0].finished]
        if not self._waiting:
            return
        owners = np.repeat(step.rows, step.counts)[step.token_ids == -1]
        needed = [place for place, (_, rows) in enumerate(self._waiting, 1) if np.isin(rows, owners).any()]
        count = max(len(self._waiting) - self._most, *needed, 0)
        for each, _ in self._waiting[:count]:
            each.finish()
        del self._waiting[:count]
        self.overtaken += len(self._waiting)

    def add(self, step: Step, finish: Callable[[], LaunchedStep]) -> DeferredStep:
        """A step whose layers have been launched.

        Args:
            step: The step.
            finish: Launches the rest.
        """
        deferred = DeferredStep(finish)
        self._waiting.append((deferred, step.rows[step.samples > 0]))
        return deferred

    def finish(self) -> None:
        """Finishes all."""
        for each, _ in self._waiting:
            each.finish()
        self._waiting.clear()
