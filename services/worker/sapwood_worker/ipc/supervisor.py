"""Keeps a scheduler process running: starts it, sees its end, starts another."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from sapwood_common.errors import ConfigError
from sapwood_worker.ipc.launch import SchedulerProcess
from sapwood_worker.ipc.messages import FromScheduler, ToScheduler
from sapwood_worker.ipc.rank import LOST_AFTER, LOST_AT_START_AFTER, RankSilence
from sapwood_worker.ipc.standing import RankStanding, hung, stuck
from sapwood_worker.ipc.vitals import Vitals
from sapwood_worker.records.model_info import ModelInfo

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
_LEAST_FROZEN = 0.5
"""Seconds without a sign of life below which none are reported: the pulse also comes late when CPU is short."""
_MOST_PATIENCE = 16.0
"""How many times as long as at first a rank may hang in the end, where ranks that hung have been ended before."""


class Supervisor:
    """Holds the current scheduler process.

    Life cycle: construct, :meth:`start`, :meth:`ready`, then :meth:`run` and, when that returns, :meth:`start` and
    :meth:`ready` again; :meth:`stop` in the end.

    Args:
        make: Makes a process.
        watchdog_timeout: Seconds after which a step, or a process without a sign of life, counts as stuck.
        watchdog_restart: Seconds after which the process is ended.
    """

    def __init__(self, make: Callable[[], SchedulerProcess], watchdog_timeout: float, watchdog_restart: float) -> None:
        self._make = make
        self._timeout = watchdog_timeout
        self._restart = watchdog_restart
        self._process: SchedulerProcess | None = None
        self._pauses = Pauses(time.monotonic)
        self._was_ready = False
        self._patience = 1.0

    async def start(self) -> None:
        """Starts a process, after what is left of the last one is gone; where they end again and again, after a pause."""
        await self.stop()
        if seconds := self._pauses.seconds:
            logger.error("it has ended %d times in a row: it is started anew in %.0f s", self._pauses.ends, seconds)
            await asyncio.sleep(seconds)
        self._process = self._make()
        self._process.start()

    async def ready(self) -> ModelInfo:
        """Waits until the process has loaded its model.

        Where it had done so before, it is started until it does. Where a host leaves that some of the ranks were on, it is waited
        for and all begin anew.

        Raises:
            ConfigError: It cannot.
        """
        while True:
            await self._current.meet()
            watching = asyncio.ensure_future(self._watch_start(self._current))
            try:
                info = await self._current.ready()
            except ConfigError as error:
                if not (self._was_ready or self._current.waits_for_a_node):
                    raise
                logger.error("%s", error)
                if not self._current.waits_for_a_node:
                    self._pauses.has_ended()
            else:
                self._pauses.is_up()
                self._was_ready = True
                return info
            finally:
                watching.cancel()
            await self.start()

    def send(self, message: ToScheduler) -> None:
        """Queues a message for the process; never blocks."""
        self._current.send(message)

    async def run(self, receive: Callable[[FromScheduler], None], vitals: Vitals, on_change: Callable[[], None]) -> str:
        """Runs until the process ends; returns how it ended.

        Args:
            receive: Gets each message.
            vitals: Kept up to date.
            on_change: Called when ``vitals.well`` has changed.
        """
        watching = asyncio.ensure_future(self._watch(self._current, vitals, on_change))
        try:
            return await self._current.run(receive)
        finally:
            watching.cancel()
            if self._current.lost is not None:
                vitals.losses[self._current.lost] += 1
            vitals.reset()
            on_change()
            self._pauses.has_ended()

    async def stop(self) -> None:
        """Ends the process, if there is one. Never fails."""
        if self._process is not None:
            await self._process.stop()
            self._process = None

    @property
    def _current(self) -> SchedulerProcess:
        assert self._process is not None
        return self._process

    async def _watch_start(self, process: SchedulerProcess) -> None:
        silences = [RankSilence(rank, _POLL_SECONDS) for rank in process.ranks]
        while not _end_if_lost(process, silences, LOST_AT_START_AFTER):
            await asyncio.sleep(_POLL_SECONDS)
            for each in silences:
                each.check()

    async def _watch(self, process: SchedulerProcess, vitals: Vitals, on_change: Callable[[], None]) -> None:
        interval = min(_POLL_SECONDS, self._timeout / 4)
        silences = [RankSilence(rank, interval) for rank in process.ranks]
        standings = [RankStanding(rank, interval) for rank in process.ranks if process.size > 1]
        while True:
            silent = [each.check() for each in silences]
            was_well, was_stuck = vitals.well, vitals.stuck
            vitals.silent = [seconds if seconds >= _LEAST_FROZEN else 0.0 for seconds in silent]
            vitals.resident = [rank.process.resident_bytes() for rank in process.ranks]
            vitals.frozen = max(vitals.silent)
            vitals.step = process.progress.seconds()
            worst = max(vitals.frozen, vitals.step)
            vitals.stuck = worst > self._timeout
            if vitals.stuck and not was_stuck:
                logger.error("nothing done for %.1f s: the worker is stuck", worst)
            elif was_stuck and not vitals.stuck:
                logger.warning("the worker is no longer stuck")
            elif vitals.well != was_well:
                logger.warning("the scheduler process %s", "lives" if vitals.well else "gives no sign of life")
            if vitals.well != was_well:
                on_change()
            if _end_if_lost(process, silences, LOST_AFTER):
                return
            found = [*(each.check() for each in standings), *process.standings_elsewhere]
            rank, seconds = hung(found, process.alike, self._patience), stuck(found, self._patience)
            if rank is not None or seconds is not None:
                self._patience = min(2 * self._patience, _MOST_PATIENCE)  # were it only slow, it would be so again
                if rank is not None:
                    await process.end_hung(rank.rank, rank.seconds)
                else:
                    process.kill(f"the ranks' devices hang: all {process.size} have had a step for {seconds:.1f} s")
                return
            if worst > self._restart:
                logger.error("nothing done for %.1f s: its process is ended", worst)
                process.kill(f"nothing done for {worst:.1f} s")
                return
            await asyncio.sleep(interval)


def _end_if_lost(process: SchedulerProcess, silences: list[RankSilence], limit: float) -> bool:
    """Ends the processes of a group if one of them has given no sign of life for so many seconds; returns whether it has."""
    for each in silences:
        if process.size > 1 and each.seconds > limit:
            process.kill(f"{each.rank.name} has given no sign of life for {each.seconds:.1f} s", each.rank.number)
            return True
    return False


# Pauses before restarts of something that ends again and again.
LASTING_SECONDS = 120.0
"""What was up for so long did not end because of its start."""
_AT_ONCE = 2
_FIRST_SECONDS = 2.0
_LONGEST_SECONDS = 60.0


class Pauses:
    """How long to wait before a process that ended is started again.

    Not at all after the first two ends in a row, then 2 s, twice as long after each further one, and 60 s at most.

    Args:
        clock: Seconds, monotonic.

    Attributes:
        ends: Ends in a row; the process was not up for ``LASTING_SECONDS`` before any of them but the first.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._up_since: float | None = None
        self.ends = 0

    def is_up(self) -> None:
        """Notes that the process has started."""
        self._up_since = self._clock()

    def has_ended(self) -> None:
        """Notes that the process has ended, or could not start."""
        lasted = self._up_since is not None and self._clock() - self._up_since >= LASTING_SECONDS
        self._up_since = None
        self.ends = 1 if lasted else self.ends + 1

    @property
    def seconds(self) -> float:
        """How long to wait before the next restart."""
        beyond = self.ends - _AT_ONCE
        return 0.0 if beyond <= 0 else min(_FIRST_SECONDS * 2.0 ** min(beyond - 1, 30), _LONGEST_SECONDS)
