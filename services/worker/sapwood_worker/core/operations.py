"""What an operator asks of a scheduler: flush, pin, pause, profile. Runs in the scheduler process, between steps."""

from __future__ import annotations

from array import array
from typing import Protocol

from sapwood_common.errors import InvalidArgumentError, SapwoodError
from sapwood_worker.core.scheduler.ranks.planner import RankPlanner
from sapwood_worker.core.scheduler.scheduler import Scheduler
from sapwood_worker.ipc.messages import (
    Answered,
    CallFailed,
    Flush,
    Operation,
    Pause,
    Pin,
    Resume,
    StartProfile,
    StopProfile,
    Unpin,
)


class Profiler(Protocol):
    """Records what the process does."""

    def start(self, folder: str) -> None:
        """Begins to record; the trace will be written into ``folder``."""
        ...

    def stop(self) -> str:
        """Ends the recording and writes it; returns the file's path."""
        ...


class Operations:
    """Carries out operators' requests.

    Args:
        scheduler: The core.
        profiler: Records; None: this process cannot record.
    """

    def __init__(self, scheduler: Scheduler | RankPlanner, profiler: Profiler | None = None) -> None:
        self._scheduler = scheduler
        self._profiler = profiler
        self._recording = False

    def run(self, operation: Operation) -> Answered | CallFailed:
        """Carries out an operation; returns the answer to send."""
        try:
            return self._run(operation)
        except SapwoodError as error:
            return CallFailed(operation.call, type(error).__name__, error.message, error.field)

    def _run(self, operation: Operation) -> Answered:
        match operation:
            case Flush(call):
                return Answered(call, self._scheduler.flush_cache())
            case Pin(call, name, token_ids, namespace, seconds):
                return Answered(call, self._scheduler.pin(name, array("I", token_ids), namespace, seconds))
            case Unpin(call, name):
                return Answered(call, int(self._scheduler.unpin(name)))
            case Pause(call, retract):
                self._scheduler.pause(retract=retract)
                return Answered(call)
            case Resume(call):
                self._scheduler.resume()
                return Answered(call)
            case StartProfile(call, folder):
                self._start_profile(folder)
                return Answered(call)
            case StopProfile(call):
                return Answered(call, text=self._stop_profile())

    def _start_profile(self, folder: str) -> None:
        if self._profiler is None:
            raise InvalidArgumentError("this worker cannot record a profile")
        if self._recording:
            raise InvalidArgumentError("a profile is being recorded already")
        try:
            self._profiler.start(folder)
        except OSError as error:
            raise InvalidArgumentError(f"cannot write a profile to {folder}: {error}", field="folder") from error
        self._recording = True

    def _stop_profile(self) -> str:
        if self._profiler is None or not self._recording:
            raise InvalidArgumentError("no profile is being recorded")
        self._recording = False
        return self._profiler.stop()
