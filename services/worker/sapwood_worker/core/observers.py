"""Observers of the scheduler process's loop: clocks, counters and the watchdog. They do not take part in its work."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.ipc.liveness import BEGAN, map_progress
from sapwood_worker.ipc.messages import Step
from sapwood_worker.records.handoff import log_stage
from sapwood_worker.records.load import Load, LoadTime, StepTime
from sapwood_worker.records.model_info import ModelInfo
from sapwood_worker.records.pictures import PictureUse
from sapwood_worker.records.step import CacheLoad, ModelOutput
from sapwood_worker.records.step import Step as PlannedStep

logger = logging.getLogger(__name__)


_EVERY = 1.0
"""Seconds between two looks at the counts of all-reduces while there is work."""


class Observer:
    """The events of the loop. Each method does nothing unless a subclass says otherwise."""

    def idle(self) -> None:
        """The loop is about to wait for messages, because there is nothing to compute."""

    def begin(self) -> None:
        """A round of the loop begins: messages, plan, cache and model."""

    def end(self) -> None:
        """The round has ended."""

    def submitted(self, request: Request) -> None:
        """A request waits."""

    def aborted(self, serial: int) -> None:
        """A request will not run any more."""

    def planned(self, step: PlannedStep) -> None:
        """A step is about to be launched. Its arrays may change later."""

    def launched(self, step: PlannedStep) -> None:
        """The step has been launched."""

    def done(self, result: ModelOutput) -> None:
        """The oldest launched step has ended."""

    def failed(self, error: BaseException, requests: Sequence[str], load: Load) -> None:
        """All launched steps have failed; they were computing requests with these ids."""

    def report(self, message: Step, *, idle: bool) -> bool:
        """Adds what was seen to a message that may be sent. Returns whether that alone makes it worth sending.

        Args:
            message: The message to the front.
            idle: Whether there is nothing to compute.
        """
        return False

    def sent(self) -> None:
        """The message of the last :meth:`report` was sent."""


class StepClock(Observer):
    """Measures how long steps take and when requests leave the queue.

    Args:
        clock: Seconds, monotonic, the same in all processes.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: set[int] = set()
        self._times: list[StepTime] = []
        self._current: deque[tuple[float, int, int, list[int], list[CacheLoad]]] = deque()

    def submitted(self, request: Request) -> None:
        self._waiting.add(request.serial)

    def aborted(self, serial: int) -> None:
        self._waiting.discard(serial)

    def planned(self, step: PlannedStep) -> None:
        """O(requests that enter with the step), and a look at the others' numbers."""
        started: list[int] = []
        loads: list[CacheLoad] = []
        prefill = decode = 0
        for part in step.parts or (step,):
            started += [entry.serial for entry in part.entries if entry.serial in self._waiting]
            decodes = (part.starts > 0) & ((part.counts == 1) | (part.samples > 1))
            prefill += len(part.token_ids) - int(part.counts[decodes].sum())
            decode += int(decodes.sum())
            loads += () if part.copies is None else part.copies.loads
        self._waiting.difference_update(started)
        self._current.append((self._clock(), prefill, decode, started, loads))

    def done(self, result: ModelOutput) -> None:
        self._ended(result.copied.load_seconds, result.spared_tokens)

    def failed(self, error: BaseException, requests: Sequence[str], load: Load) -> None:
        while self._current:
            self._ended()

    def report(self, message: Step, *, idle: bool) -> bool:
        message.times = self._times
        return False

    def sent(self) -> None:
        self._times = []

    def _ended(self, load_seconds: float = 0.0, spared_tokens: int = 0) -> None:
        at, prefill, decode, started, loads = self._current.popleft()
        times: list[LoadTime] = []
        for load in loads:
            if load.fetched:
                times.append(LoadTime(load.serial, "storage", load.fetched, load.began, load.ended))
            times.append(LoadTime(load.serial, "host", load.pages, at, at + load_seconds))
        self._times.append(StepTime(self._clock() - at, prefill, decode, started, at, times, spared_tokens))


class Watchdog(Observer):
    """Shows the front how long the loop is at its round, and has the stacks of all threads written when a round hangs.

    Args:
        path: The shared file; :class:`~sapwood_worker.ipc.liveness.ProgressView` has made it.
        timeout: Seconds after which a round counts as hung.
    """

    def __init__(self, path: Path, timeout: float) -> None:
        self._memory = map_progress(path)
        self._timeout = timeout
        self._armed_until = 0.0

    def begin(self) -> None:
        now = time.monotonic()
        BEGAN.pack_into(self._memory, 0, now)
        # Each arming starts a thread: once in a quarter of the time is enough, and the dump comes at most that much early.
        if now > self._armed_until:
            self._armed_until = now + self._timeout / 4
            faulthandler.dump_traceback_later(self._timeout, file=sys.stderr)

    def end(self) -> None:
        BEGAN.pack_into(self._memory, 0, 0.0)

    def idle(self) -> None:
        if self._armed_until:
            self._armed_until = 0.0
            faulthandler.cancel_dump_traceback_later()


class AllReduceWatch(Observer):
    """Reports by which methods ranks have reduced tensors, once a second and when work ends.

    Args:
        read: Gives how often each method was used, of what is computed by now.
        clock: Gives seconds.
    """

    def __init__(self, read: Callable[[], dict[str, int]], clock: Callable[[], float] = time.monotonic) -> None:
        self._read, self._clock = read, clock
        self._looked = clock() - _EVERY
        self._told: dict[str, int] | None = None

    def report(self, message: Step, *, idle: bool) -> bool:
        now = self._clock()
        if not idle and now < self._looked + _EVERY:
            return False
        self._looked = now
        counts = self._read()
        if counts == self._told:
            return False
        message.sums = self._told = counts
        return True


class PictureWatch(Observer):
    """Reports what became of pictures, when something has.

    Args:
        read: Gives it.
    """

    def __init__(self, read: Callable[[], PictureUse]) -> None:
        self._read = read
        self._shown = PictureUse()

    def report(self, message: Step, *, idle: bool) -> bool:
        use = self._read()
        if use == self._shown:
            return False
        message.pictures = self._shown = use
        return True


class StageLog(Observer):
    """Writes a debug line at each stage of a step, for ``benchmarks/gpu/bench_handoff.py --stages``."""

    def __init__(self) -> None:
        self._waiting: set[int] = set()
        self._begins: deque[bool] = deque()

    def submitted(self, request: Request) -> None:
        self._waiting.add(request.serial)

    def aborted(self, serial: int) -> None:
        self._waiting.discard(serial)

    def planned(self, step: PlannedStep) -> None:
        begun = {entry.serial for part in step.parts or (step,) for entry in part.entries} & self._waiting
        self._waiting -= begun
        self._begins.append(bool(begun))
        if step.entries:
            log_stage("step planned")

    def launched(self, step: PlannedStep) -> None:
        if step.entries:
            log_stage("step launched")

    def done(self, result: ModelOutput) -> None:
        if self._begins.popleft():
            log_stage("first token")

    def failed(self, error: BaseException, requests: Sequence[str], load: Load) -> None:
        self._begins.clear()


# The report of a failed step: the last steps and the shapes of their inputs. Never tokens.


KEPT_STEPS = 16
MOST_FILES = 8


class CrashDump(Observer):
    """Remembers the last steps.

    Args:
        folder: Where the files go; made if it is not there. The oldest of more than ``MOST_FILES`` files go.
        info: The model's.
    """

    def __init__(self, folder: Path, info: ModelInfo) -> None:
        self._folder = folder
        self._info = info
        self._steps: deque[dict[str, Any]] = deque(maxlen=KEPT_STEPS)

    def planned(self, step: PlannedStep) -> None:
        self._steps.append({"number": step.number, "at": time.time()} | _shape_of(step))

    def failed(self, error: BaseException, requests: Sequence[str], load: Load) -> None:
        self.write(error, requests, load)

    def write(self, error: BaseException, requests: Sequence[str], load: Load) -> Path | None:
        """Writes a file; a folder that cannot be written is logged, for the failure itself matters more.

        Args:
            error: What went wrong.
            requests: The ids of the requests that were computed.
            load: The scheduler's.

        Returns:
            The file; None if there is none.
        """
        seconds, rest = divmod(time.time_ns(), 10**9)
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(seconds))
        path = self._folder / f"crash-{stamp}-{rest:09d}-{os.getpid()}.json"  # in their order by name
        content = {
            "at": seconds,
            "error": traceback.format_exception(error),
            "requests": list(requests),
            "model": msgspec.structs.asdict(self._info),
            "load": msgspec.structs.asdict(load),
            "steps": list(self._steps),
        }
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(content, indent=1, default=str) + "\n")
            for old in sorted(self._folder.glob("crash-*.json"))[:-MOST_FILES]:
                old.unlink(missing_ok=True)
        except OSError as problem:
            logger.warning("%s: no crash dump could be written: %s", path, problem.strerror)
            return None
        logger.error("what the last steps were is in %s", path)
        return path


def _shape_of(step: PlannedStep) -> dict[str, Any]:
    """The shape of a step, or of each rank's part of it, without the tokens."""
    if step.parts:
        return {"ranks": [_shape_of(part) for part in step.parts]}
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "token_ids": step.token_ids,
        "pages": step.pages,
        "masked": step.masked,
    }
    return {
        "rows": step.rows.tolist(),
        "starts": step.starts.tolist(),
        "counts": step.counts.tolist(),
        "samples": step.samples.tolist(),
        "shapes": {name: [*array.shape, str(array.dtype)] for name, array in arrays.items()},
        "entered": [{"row": entry.row, "serial": entry.serial} for entry in step.entries],
        "copies": step.copies is not None,
    }
