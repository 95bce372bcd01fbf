"""Measures how long steps take and when requests leave the queue; the front is told with the outputs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from sapwood_worker.records.page_copies import CacheLoad
from sapwood_worker.records.step import Step
from sapwood_worker.records.step_time import LoadTime, StepTime


class StepClock:
    """Life cycle of a step: :meth:`planned`, then :meth:`done`; :meth:`take` gives what was measured since the last call.

    Args:
        clock: Seconds, monotonic, the same in all processes.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: set[int] = set()
        self._times: list[StepTime] = []
        self._current: deque[tuple[float, int, int, list[int], list[CacheLoad]]] = deque()

    def submitted(self, serial: int) -> None:
        """Notes that a request waits."""
        self._waiting.add(serial)

    def aborted(self, serial: int) -> None:
        """Notes that a request will not run any more."""
        self._waiting.discard(serial)

    def planned(self, step: Step) -> None:
        """Notes that a step begins. O(requests that enter with it), and a look at the others' numbers."""
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

    def done(self, load_seconds: float = 0.0, spared_tokens: int = 0) -> bool:
        """Notes that the oldest unfinished step has ended; its loads took so many seconds, and so many tokens were not read.
        Returns whether a request has begun with it."""
        at, prefill, decode, started, loads = self._current.popleft()
        times: list[LoadTime] = []
        for load in loads:
            if load.fetched:
                times.append(LoadTime(load.serial, "storage", load.fetched, load.began, load.ended))
            times.append(LoadTime(load.serial, "host", load.pages, at, at + load_seconds))
        self._times.append(StepTime(self._clock() - at, prefill, decode, started, at, times, spared_tokens))
        return bool(started)

    def failed(self) -> None:
        """Drops all unfinished steps, which have failed."""
        while self._current:
            self.done()

    def take(self) -> list[StepTime]:
        """Removes and returns the steps that ended since the last call."""
        times, self._times = self._times, []
        return times
