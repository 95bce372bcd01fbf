"""How long steps take and when requests leave the queue: taken in the scheduler process, told to the front with the outputs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import msgspec

from sapwood_worker.scheduler.output import SchedulerOutput


class StepTime(msgspec.Struct, frozen=True, array_like=True):
    """One step.

    Attributes:
        seconds: From its plan to its tokens.
        prefill_tokens: Prompt tokens computed.
        decode_tokens: Requests that decoded a token.
        started: Requests (serials) of which it was the first, that is, which were waiting before.
        at: When it was planned, on ``time.monotonic``'s clock, which all processes of a machine share.
    """

    seconds: float
    prefill_tokens: int
    decode_tokens: int
    started: list[int]
    at: float


class StepClock:
    """Life cycle of a step: :meth:`planned`, then :meth:`done`; :meth:`take` gives what was measured since the last call.

    Args:
        clock: Seconds, monotonic, the same in all processes.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: set[int] = set()
        self._times: list[StepTime] = []
        self._current: deque[tuple[float, int, int, list[int]]] = deque()

    def submitted(self, serial: int) -> None:
        """A request waits."""
        self._waiting.add(serial)

    def aborted(self, serial: int) -> None:
        """A request will not run any more."""
        self._waiting.discard(serial)

    def planned(self, output: SchedulerOutput) -> None:
        """A step begins. O(requests in it)."""
        started: list[int] = []
        prefill = decode = 0
        for item in output.requests:
            if item.start and len(item.token_ids) == 1:
                decode += 1
            else:
                prefill += len(item.token_ids)
            if item.serial in self._waiting:
                self._waiting.discard(item.serial)
                started.append(item.serial)
        self._current.append((self._clock(), prefill, decode, started))

    def done(self) -> None:
        """Of the steps that have not ended the one planned first has."""
        at, prefill, decode, started = self._current.popleft()
        self._times.append(StepTime(self._clock() - at, prefill, decode, started, at))

    def failed(self) -> None:
        """All steps that have not ended have failed."""
        while self._current:
            self.done()

    def take(self) -> list[StepTime]:
        """The steps since the last call; the caller owns the list."""
        times, self._times = self._times, []
        return times
