"""The followers of a group, as its leader sees them."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from multiprocessing.connection import Connection
from typing import TypeVar

from sapwood_common.errors import ConfigError
from sapwood_worker.core.group.follower import COLLECT, COUNT_EXPERTS, READY, finished
from sapwood_worker.core.group.report import RankReport
from sapwood_worker.records.ranks.waits import DEVICE, Waits
from sapwood_worker.records.step import LaunchedStep, ModelOutput, RankGoneError, RankLostError

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
        asynchronous: Whether steps are computed while their leader goes on.
        waits: Shows which of them the leader waits for, or that it waits for its device. None: nobody looks.

    Attributes:
        waits: The same, or one at which nobody looks.

    Raises:
        ConfigError: A rank could not load its part of the model.
    """

    def __init__(self, ways: Sequence[Connection], waits: Waits | None, *, asynchronous: bool) -> None:
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
        """Raises RankLostError where devices have failed after other exchanges than here: what one has launched waits there for
        what the others launch next, which is something else."""
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
        """Asks ranks how many tokens their experts have got with the steps so far, but for those that owe an answer yet.

        Raises:
            RankLostError: One is gone.
        """
        for rank in ranks:
            if rank not in self._asked:
                self.tell_one(rank, COUNT_EXPERTS)
                self._asked.add(rank)

    def experts(self, ranks: Sequence[int], *, idle: bool) -> list[list[int]]:
        """What ranks have answered last, one after another: for each layer the tokens of each expert.

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
