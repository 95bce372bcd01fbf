"""What rank 0's runners have in common: they show the group as one runner, and launch each step on all ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

from sapwood_worker.core.group.followers import Followers
from sapwood_worker.core.loaded_runner import LoadedRunner
from sapwood_worker.records.ranks.waits import Waits
from sapwood_worker.records.step import LaunchedStep, ModelOutput, Step


class LeadingRunner(ABC):
    """Implements :class:`~sapwood_worker.core.loaded_runner.LoadedRunner` for rank 0, but for how a step is handed out.

    Args:
        runner: This rank's part of the model.
        followers: The ways to ranks 1 and up, whose models are waited for.
        waits: Shows for which of them this one waits; None: nobody looks.

    Raises:
        ConfigError: A rank could not load its part of the model.
    """

    def __init__(self, runner: LoadedRunner, followers: Sequence[Connection], waits: Waits | None = None) -> None:
        self._followers = group = Followers(followers, waits, asynchronous=runner.asynchronous)
        experts = runner.experts
        self.experts: Callable[[], Callable[[], list[list[int]]]] | None = None
        if experts is not None:
            self.experts = lambda: group.shown(experts())
        self.sums = runner.sums
        self.info = runner.info
        self.vocabulary = runner.vocabulary
        self.exchanged_bytes = runner.exchanged_bytes
        self.host_pool = runner.host_pool
        self.asynchronous = runner.asynchronous
        self._runner = runner

    def own_pool(self) -> None:  # noqa: B027 - not abstract: it is nothing for both
        """None: a rank has but a part of a page."""

    def execute(self, step: Step) -> ModelOutput:
        return self.launch(step).result()

    @abstractmethod
    def launch(self, step: Step) -> LaunchedStep:
        """As :meth:`LoadedRunner.launch`."""


class GroupStep:
    """Implements :class:`~sapwood_worker.records.step.LaunchedStep`.

    Args:
        own: What rank 0 computes of it, or has failed with.
        collect: Waits until all ranks have computed the oldest unfinished step, which this one is then.
    """

    def __init__(
        self, own: LaunchedStep | Exception, collect: Callable[[LaunchedStep | Exception], ModelOutput]
    ) -> None:
        self._own = own
        self._collect = collect

    def result(self) -> ModelOutput:
        return self._collect(self._own)

    def check(self) -> None:
        if not isinstance(self._own, Exception):
            self._own.check()
