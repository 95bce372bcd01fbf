"""Runners of several ranks: all compute the same requests, or each has requests of its own (data-parallel attention)."""

from __future__ import annotations

import functools
import select
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import TypeVar

import numpy as np

from sapwood_common.errors import ConfigError
from sapwood_worker.core.group.follower import (
    COLLECT,
    COUNT_EXPERTS,
    READY,
    RankReport,
    WeightsMessage,
    attempt,
    drop_message,
    finished,
    read_message,
)
from sapwood_worker.core.loaded_runner import LoadedRunner
from sapwood_worker.records.lora import Lora, LoraFacts
from sapwood_worker.records.ranks import DEVICE, Waits
from sapwood_worker.records.step import (
    CopyReport,
    LateMasks,
    LaunchedStep,
    Masks,
    ModelOutput,
    RankGoneError,
    RankLostError,
    ReadyMasks,
    Step,
)
from sapwood_worker.records.step_wire import encode, encode_masks
from sapwood_worker.records.weights import Memory, TrainerGroup, WeightBucket, WeightsFacts

# The leader's runner: hands every step to the followers, and looks whether all ranks sample the same.


# The followers of a group, as its leader sees them.


ResultT = TypeVar("ResultT")

_ALONE_SECONDS = 1.0
"""Seconds that ranks get to report a step that has failed on another."""
_LOOK_SECONDS = 0.25
"""Seconds without a report after which the leader looks at its own device."""


class Followers:
    """Ranks 1 and up. A step is a few kilobytes: it goes over a socket to each, whose other end the kernel wakes at once, and
    which ends with either process.

    Args:
        ways: The ways to them; their models are waited for.
        asynchronous: Whether steps are computed while their leader continues.
        waits: Shows for which of them the leader waits, or that it waits for its device. None: it is not shown.

    Attributes:
        waits: The same, or one at which nobody looks.
        speaking: Held while messages are sent; a step and its masks are sent without another message between them.

    Raises:
        ConfigError: A rank could not load its part of the model.
    """

    def __init__(self, ways: Sequence[Connection], waits: Waits | None, *, asynchronous: bool) -> None:
        self.speaking = threading.RLock()
        self.waits = waits or Waits()
        self._ways = ways
        self._asynchronous = asynchronous
        self._experts: dict[int, list[list[int]]] = {}
        self._asked: set[int] = set()
        for rank, way in enumerate(ways, 1):
            try:
                said = way.recv_bytes()
            except (EOFError, OSError):
                said = b"it has ended"
            if said != READY:
                raise ConfigError(f"rank {rank} of {1 + len(ways)}: {said.decode(errors='replace')}")

    def __len__(self) -> int:
        return len(self._ways)

    def tell(self, message: bytes | bytearray) -> None:
        """Sends a message to all. Raises RankLostError if one is gone."""
        for rank in range(1, 1 + len(self._ways)):
            self.tell_one(rank, message)

    def tell_one(self, rank: int, message: bytes | bytearray) -> None:
        """Sends a message to one of them. Raises RankLostError if it is gone."""
        try:
            with self.speaking:
                self._ways[rank - 1].send_bytes(message)
        except OSError as error:
            raise RankGoneError(f"rank {rank} is gone") from error

    def collect(self, launched: LaunchedStep | Exception) -> tuple[ModelOutput, list[RankReport]]:
        """Waits until all ranks have computed the oldest unfinished step; returns what the leader got, and the others' reports.

        Args:
            launched: The step here, or what it failed with.

        Raises:
            RankLostError: Some have not.
            Exception: What the step failed with, on all ranks.
        """
        self.tell(COLLECT)
        launched = finished(launched)
        reports = self._reports(launched)
        failed = [(rank, report.error) for rank, report in enumerate(reports, 1) if report.error]
        if failed and (len(failed) < len(reports) or (self._asynchronous and not isinstance(launched, Exception))):
            raise RankLostError("rank {} failed: {}".format(*failed[0]))
        self._assure_alike(reports)
        try:
            with self.waits.on(DEVICE) if self._asynchronous else nullcontext():
                output = _result(launched)
        except Exception as error:
            if failed:
                raise
            raise RankLostError(f"rank 0 failed alone: {error}") from error
        for rank, report in enumerate(reports, 1):
            if report.error:
                raise RankLostError(f"rank {rank} failed: {report.error}")
        return output, reports

    def _assure_alike(self, reports: Sequence[RankReport]) -> None:
        """Raises RankLostError if devices failed after different numbers of exchanges: a launched exchange on one device would
        wait for a different exchange on the others."""
        for rank, report in enumerate(reports, 1):
            if self._asynchronous and report.error and report.entered != self.waits.entered:
                raise RankLostError(f"rank {rank} failed in another place than rank 0: {report.error}")

    def shown(self, ask: Callable[[], ResultT]) -> Callable[[], ResultT]:
        """A call that waits for the device, and shows it."""

        def asked() -> ResultT:
            with self.waits.on(DEVICE):
                return ask()

        return asked

    def ask_experts(self, ranks: Sequence[int]) -> None:
        """Asks ranks how many tokens their experts have got in the steps so far; ranks that still owe an answer are not asked.

        Raises:
            RankLostError: One is gone.
        """
        for rank in ranks:
            if rank not in self._asked:
                self.tell_one(rank, COUNT_EXPERTS)
                self._asked.add(rank)

    def experts(self, ranks: Sequence[int], *, idle: bool) -> list[list[int]]:
        """The ranks' last answers, one after another: for each layer, the tokens of each expert.

        Args:
            ranks: The ranks; each has answered once.
            idle: Whether all steps have been collected: so what was asked is waited for. Else it comes with steps' reports.

        Raises:
            RankLostError: One is gone.
        """
        if idle:
            for rank in ranks:
                while rank in self._asked:
                    self._report_of(rank)
        return [layer for rank in ranks for layer in self._experts[rank]]

    def _reports(self, launched: LaunchedStep | Exception) -> list[RankReport]:
        """The followers' reports of a step, in their order. Each comes when the step is over there. That it never is where
        another rank has failed alone: so once one has, the others get but a while.

        Raises:
            RankLostError: They did not come, or this rank's device has failed.
        """
        reports: dict[int, RankReport] = {}
        missing = {way.fileno(): rank for rank, way in enumerate(self._ways, 1)}
        coming = select.poll()
        for descriptor in missing:
            coming.register(descriptor, select.POLLIN)
        failed = f"rank 0 failed alone: {launched}" if isinstance(launched, Exception) else ""
        until = time.monotonic() + _ALONE_SECONDS
        while missing:
            # Shown once for all of the silence: who waits and looks up comes no further.
            with self.waits.on(sum(1 << rank for rank in missing.values())):
                while not (found := coming.poll(1000 * _LOOK_SECONDS)):
                    _assure_hope(launched, failed, until)
            for descriptor, _ in found:
                rank = missing[descriptor]
                report = self._report_of(rank)
                if report is None:
                    continue
                coming.unregister(descriptor)
                del missing[descriptor]
                reports[rank] = report
                if report.error and not failed:
                    failed, until = f"rank {rank} failed: {report.error}", time.monotonic() + _ALONE_SECONDS
        return [reports[rank] for rank in sorted(reports)]

    def _report_of(self, rank: int) -> RankReport | None:
        """A follower's report, which has come or is coming; None: it was of its experts, and is kept."""
        try:
            with self.waits.on(1 << rank):
                report = RankReport.from_bytes(self._ways[rank - 1].recv_bytes())
        except Exception as error:  # the end of the connection, or what the rank says of its own
            raise RankGoneError(f"rank {rank} is gone") from error
        if report.experts is None:
            return report
        self._experts[rank] = report.experts
        self._asked.discard(rank)
        return None


def _assure_hope(launched: LaunchedStep | Exception, failed: str, until: float) -> None:
    """Raises RankLostError if reports that are missing need not be waited for: a rank has failed, and its time is over, or this
    one's device has."""
    if failed and time.monotonic() > until:
        raise RankLostError(failed) from (launched if isinstance(launched, Exception) else None)
    if isinstance(launched, Exception):
        return
    try:
        launched.check()
    except Exception as error:
        raise RankLostError(failed or f"rank 0 failed: {error}") from error


def _result(launched: LaunchedStep | Exception) -> ModelOutput:
    if isinstance(launched, Exception):
        raise launched
    return launched.result()


# The common part of rank 0's runners: they show the group as one runner, and launch each step on all ranks.


class LeadingRunner(ABC):
    """Implements :class:`~sapwood_worker.core.loaded_runner.LoadedRunner` for rank 0; subclasses send the steps to the ranks.

    Args:
        runner: This rank's part of the model.
        followers: The ways to ranks 1 and up, whose models are waited for.
        waits: Shows for which of them this rank waits; None: it is not shown.

    Raises:
        ConfigError: A rank could not load its part of the model.
    """

    def __init__(self, runner: LoadedRunner, followers: Sequence[Connection], waits: Waits | None = None) -> None:
        self._followers = group = Followers(followers, waits, asynchronous=runner.asynchronous)
        experts = runner.experts
        self.experts: Callable[[], Callable[[], list[list[int]]]] | None = None
        if experts is not None:
            self.experts = lambda: group.shown(experts())
        self.sums, self.check_pictures = runner.sums, runner.check_pictures
        self.picture_use = runner.picture_use
        self.info = runner.info
        self.vocabulary = runner.vocabulary
        self.exchanged_bytes = runner.exchanged_bytes
        self.host_pool = runner.host_pool
        self.asynchronous = runner.asynchronous
        self._runner = runner

    def own_pool(self) -> None:  # noqa: B027 - not abstract: it is nothing for both
        """None: a rank has but a part of a page."""

    def read_lora(self, lora: Lora) -> LoraFacts:
        """As :meth:`LoadedRunner.read_lora`; the ranks' runners agree among themselves whether all have read it."""
        self._followers.tell(read_message(lora))
        return self._runner.read_lora(lora)

    def drop_lora(self, number: int) -> None:
        self._followers.tell(drop_message(number))
        self._runner.drop_lora(number)

    def stage_weights(self, bucket: WeightBucket) -> WeightsFacts:
        """As :meth:`LoadedRunner.stage_weights`; the ranks' runners agree among themselves."""
        self._followers.tell(WeightsMessage("stage", bucket.update, bucket).to_bytes())
        return self._runner.stage_weights(bucket)

    def ready_weights(self, update: int, *, partial: bool) -> WeightsFacts:
        self._followers.tell(WeightsMessage("ready", update, flag=partial).to_bytes())
        return self._runner.ready_weights(update, partial=partial)

    def exchange_weights(self, update: int, *, keep: bool) -> bytes:
        """As :meth:`LoadedRunner.exchange_weights`: every rank does so between the same two steps."""
        self._followers.tell(WeightsMessage("exchange", update, flag=keep).to_bytes())
        return self._runner.exchange_weights(update, keep=keep)

    def drop_weights(self, update: int) -> None:
        self._followers.tell(WeightsMessage("drop", update).to_bytes())
        self._runner.drop_weights(update)

    def join_group(self, group: TrainerGroup) -> None:
        """As :meth:`LoadedRunner.join_group`; it stands when all ranks are there."""
        self._followers.tell(WeightsMessage("join", group=group).to_bytes())
        self._runner.join_group(group)

    def leave_group(self, name: str) -> bool:
        self._followers.tell(WeightsMessage("leave", name=name).to_bytes())
        return self._runner.leave_group(name)

    def release_memory(self, memory: Sequence[Memory], folder: str) -> int:
        """As :meth:`LoadedRunner.release_memory`: what one rank refuses, all refuse, as they hold weights alike."""
        size = self._runner.release_memory(memory, folder)
        self._followers.tell(WeightsMessage("release", memory=tuple(memory), folder=folder).to_bytes())
        return size

    def restore_memory(self, memory: Sequence[Memory], folder: str) -> None:
        """As :meth:`LoadedRunner.restore_memory`; a rank that cannot is lost."""
        self._runner.restore_memory(memory, folder)
        self._followers.tell(WeightsMessage("restore", memory=tuple(memory), folder=folder).to_bytes())

    def execute(self, step: Step) -> ModelOutput:
        return self.launch(step).result()

    @abstractmethod
    def launch(self, step: Step) -> LaunchedStep:
        """As :meth:`LoadedRunner.launch`."""


class GroupStep:
    """Implements :class:`~sapwood_worker.records.step.LaunchedStep`.

    Args:
        own: Rank 0's part of the step, or its error.
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
        waits = self._followers.waits.launch(len(step.token_ids), asynchronous=self.asynchronous)
        with self._followers.speaking, waits:
            step.settle()
            self.tell(encode(step))
            self._in_flight += 1
            if step.masks is not None:
                masks = _SentMasks(step.masks, self)
                # Among the messages of several micro-batches they come right after their step.
                step = replace(step, masks=masks if self.info.micro_batches == 1 else ReadyMasks(masks.result().copy()))
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
        followers: The other ranks; none has received a step yet.
        ranks: One of each later stage.
        in_flight: Returns how many steps were sent and have not been collected.
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
        """The copies that have ended on all ranks; seconds are the slowest rank's."""
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


# The leader's runner where each rank has requests of its own: hands every rank its part of a step, and takes its tokens.


class DataParallelRunner(LeadingRunner):
    """The runner of rank 0 of ranks with requests of their own.

    The ranks compute a step's parts at the same time, as their layers wait for each other: a rank without a part keeps pace with
    the others. Each rank samples for its own requests, and its report has all its tokens. The input of layers that all ranks
    compute together must be the same on all ranks, so the reports have a digest of it; no token is sent before all digests are
    equal.

    Args:
        runner, followers, waits: As :class:`LeadingRunner` takes them.

    Raises:
        ConfigError: As :class:`LeadingRunner`.
    """

    draft = None

    def __init__(self, runner: LoadedRunner, followers: Sequence[Connection], waits: Waits | None = None) -> None:
        super().__init__(runner, followers, waits)
        self._identity = functools.cache(runner.cache_identity)
        self._asking = threading.Lock()

    def cache_identity(self) -> str:
        """The runner's identity for cached pages, read once for all ranks."""
        with self._asking:
            return self._identity()

    def launch(self, step: Step) -> LaunchedStep:
        """Begins a step that has a part for each rank; one without parts is rank 0's alone."""
        if not step.parts:
            step = Step(step.number, parts=(step, *[Step(step.number)] * len(self._followers)))
        own, *others = together(step)
        waits = self._followers.waits.launch(len(own.token_ids), asynchronous=self.asynchronous)
        with self._followers.speaking, waits:
            for rank, part in enumerate(others, 1):
                self._followers.tell_one(rank, encode(part))
            for rank, part in enumerate(others, 1):  # each rank reads its masks in the middle of a step that all are in
                if part.masks is not None:
                    self._followers.tell_one(rank, encode_masks(part.masks.result()))
            return GroupStep(attempt(self._runner, own), functools.partial(self._collect, step.number))

    def _collect(self, number: int, launched: LaunchedStep | Exception) -> ModelOutput:
        """Waits until all ranks have computed the oldest unfinished step, and returns their answers as its parts.

        Args:
            number: The step's.
            launched: Its part here, or what that failed with.

        Raises:
            RankLostError: Some have not, or of other rows.
            Exception: What the step failed with, on all ranks.
        """
        with self._followers.waits.on(0):
            output, reports = self._followers.collect(launched)
        parts = [output]
        for rank, report in enumerate(reports, 1):
            if report.step != number or report.output is None:
                raise RankLostError(
                    f"rank {rank} diverged: it has computed step {report.step}, the others step {number}"
                )
            parts.append(report.output)
        (usual, _), *others = Counter(part.seen for part in parts).most_common()
        if others:  # of two, the follower is named
            odd = next(rank for rank, part in enumerate(parts) if part.seen != usual)
            raise RankLostError(f"rank {odd} diverged: in step {number} it got other rows than the others")
        seconds = CopyReport(load_seconds=max(part.copied.load_seconds for part in parts))
        spared = sum(part.spared_tokens for part in parts)
        return ModelOutput(number, [], seconds, spared_tokens=spared, parts=tuple(parts))


def together(step: Step) -> list[Step]:
    """A step's parts. Each part says what all ranks compute."""
    tokens = np.array([len(part.token_ids) for part in step.parts], np.int64)
    decodes = all((part.counts == 1).all() and (part.samples == 1).all() for part in step.parts)
    return [
        replace(
            part,
            number=step.number,
            moves=step.moves,
            rank_tokens=tokens if tokens.any() else tokens[:0],
            decodes=decodes,
        )
        for part in step.parts
    ]
