"""The leader's runner: hands every step to the followers, and looks whether all ranks sample the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection

from sapwood_worker.core.group.follower import attempt
from sapwood_worker.core.group.followers import Followers
from sapwood_worker.core.group.leading_runner import GroupStep, LeadingRunner
from sapwood_worker.core.group.report import RankReport
from sapwood_worker.core.loaded_runner import LoadedRunner
from sapwood_worker.records.page_copies import CopyReport
from sapwood_worker.records.ranks.waits import Waits
from sapwood_worker.records.step import (
    LateMasks,
    LaunchedStep,
    Masks,
    ModelOutput,
    RankLostError,
    ReadyMasks,
    Step,
)
from sapwood_worker.records.step_wire import encode, encode_masks


class GroupRunner(LeadingRunner):
    """The runner of rank 0 of a group whose ranks compute the same requests.

    Ranks exchange what the layers need among themselves, and each samples from the same logits; so a step goes one way, and
    nothing comes back but a report. No tokens leave before all ranks have reported the same. Ranks of a stage count the same
    tokens of experts; so the first rank of each later stage is asked now and then.

    Args:
        runner, followers, waits: As :class:`LeadingRunner` takes them.

    Raises:
        ConfigError: As :class:`LeadingRunner`.
    """

    def __init__(self, runner: LoadedRunner, followers: Sequence[Connection], waits: Waits | None = None) -> None:
        super().__init__(runner, followers, waits)
        self.draft = runner.draft
        self._copies = _GroupCopies(1 + len(followers))
        self._in_flight = 0
        ranks = 1 + len(followers)
        each = ranks // runner.info.pipeline_parallel
        if self.experts is not None and each < ranks:
            self.experts = _StagesExperts(
                self.experts, self._followers, range(each, ranks, each), lambda: self._in_flight
            )

    def cache_identity(self) -> str:
        return self._runner.cache_identity()

    def launch(self, step: Step) -> LaunchedStep:
        with self._followers.waits.launch(len(step.token_ids), asynchronous=self.asynchronous):
            step.settle()
            self.tell(encode(step))
            self._in_flight += 1
            if step.masks is not None:
                masks = _SentMasks(step.masks, self)
                # Among the messages of several lanes they come right after their step.
                step = replace(step, masks=masks if self.info.lanes == 1 else ReadyMasks(masks.result().copy()))
            return GroupStep(attempt(self._runner, step), self._collect)

    def tell(self, message: bytes | bytearray) -> None:
        """Sends a message to all followers. Raises RankLostError if one is gone."""
        self._followers.tell(message)

    def _collect(self, launched: LaunchedStep | Exception) -> ModelOutput:
        """Waits until all ranks have computed the oldest unfinished step.

        Args:
            launched: The step here, or what it failed with.

        Raises:
            RankLostError: Some have not, or not the same.
            Exception: What the step failed with, on all ranks.
        """
        self._in_flight -= 1
        with self._followers.waits.on(0):
            output, reports = self._followers.collect(launched)
        own = RankReport.of(output)
        for rank, report in enumerate(reports, 1):
            if (report.step, report.digest) != (own.step, own.digest):
                raise RankLostError(f"rank {rank} diverged: in step {own.step} it sampled other tokens than rank 0")
        output.copied = self._copies.merge([own.copied, *(report.copied for report in reports)])
        return output


class _StagesExperts:
    """Asks what the experts of all stages have got, as :attr:`LoadedRunner.experts` does.

    While steps are under way, later stages' counts are those that came with earlier reports: as old as the last look at most.

    Args:
        own: Asks the first stage.
        followers: The other ranks; none has been told of a step yet.
        ranks: One of each later stage.
        in_flight: Gives the number of steps that have been told of and not been collected.
    """

    def __init__(
        self,
        own: Callable[[], Callable[[], list[list[int]]]],
        followers: Followers,
        ranks: Sequence[int],
        in_flight: Callable[[], int],
    ) -> None:
        self._own, self._followers, self._ranks, self._in_flight = own, followers, ranks, in_flight
        self._ask()
        self._told()  # so that it is known how many layers they have

    def __call__(self) -> Callable[[], list[list[int]]]:
        own = self._own()
        self._told()  # which may free them for another question
        self._ask()
        return lambda: own() + self._told()

    def _ask(self) -> None:
        self._followers.ask_experts(self._ranks)

    def _told(self) -> list[list[int]]:
        return self._followers.experts(self._ranks, idle=not self._in_flight())


class _SentMasks:
    """Implements :class:`~sapwood_worker.records.step.LateMasks`; sends them to the followers too, when they are there.

    Args:
        masks: The masks.
        group: Has the followers.
    """

    def __init__(self, masks: LateMasks, group: GroupRunner) -> None:
        self._masks = masks
        self._group = group

    def result(self) -> Masks:
        """May be called once, as followers read them once."""
        masks = self._masks.result()
        self._group.tell(encode_masks(masks))
        return masks


class _GroupCopies:
    """One report of all ranks' copies: a store is done when every rank has stored its part, and has failed if one has not.

    Args:
        size: Ranks.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._ended: Counter[int] = Counter()
        self._failed: set[int] = set()

    def merge(self, reports: Sequence[CopyReport]) -> CopyReport:
        """What has ended on all ranks by now; seconds are the slowest rank's."""
        for report in reports:
            self._ended.update((*report.done, *report.failed))
            self._failed.update(report.failed)
        whole = [number for number, count in self._ended.items() if count == self._size]
        for number in whole:
            del self._ended[number]
        failed = self._failed.intersection(whole)
        self._failed -= failed
        return CopyReport(
            done=tuple(number for number in whole if number not in failed),
            failed=tuple(failed),
            store_seconds=max(report.store_seconds for report in reports),
            load_seconds=max(report.load_seconds for report in reports),
        )
