"""The leader's runner where each rank has requests of its own: hands every rank its part of a step, and takes its tokens."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection

import numpy as np

from sapwood_worker.core.group.follower import attempt
from sapwood_worker.core.group.leading_runner import GroupStep, LeadingRunner
from sapwood_worker.core.loaded_runner import LoadedRunner
from sapwood_worker.records.page_copies import CopyReport
from sapwood_worker.records.ranks.waits import Waits
from sapwood_worker.records.step import LaunchedStep, ModelOutput, RankLostError, Step
from sapwood_worker.records.step_wire import encode, encode_masks


class SplitRequestsRunner(LeadingRunner):
    """The runner of rank 0 of ranks with requests of their own.

    The ranks compute a step's parts at the same time, as their layers wait for each other: a rank without a part keeps pace with
    the others. Each samples for its own requests, and its report brings all that it has sampled. What goes into the layers that
    all compute together is the same on all ranks, so the reports have a digest of it; no token leaves before all are equal.

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
        with self._followers.waits.launch(len(own.token_ids), asynchronous=self.asynchronous):
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
    """A step's parts, each of which says what all ranks compute."""
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
