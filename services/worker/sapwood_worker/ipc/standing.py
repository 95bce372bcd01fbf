"""Which rank of a group hangs: the others wait for it, it waits for nobody, and it comes no further."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import msgspec

from sapwood_worker.ipc.rank import DOUBTFUL, Rank
from sapwood_worker.records.ranks.waits import AT_REST, DEVICE, Shown

_TICKS = os.sysconf("SC_CLK_TCK")
_LEAST_SECONDS = 1.5
"""Seconds that a rank may always take, whatever the others took."""
_LEAST_DEVICE_SECONDS = 30.0
"""Seconds that devices may always take for a step which all ranks have launched."""
_MARGIN = 4.0
"""How many times as long as the others a rank may take for the same."""


class Standing(msgspec.Struct, frozen=True, array_like=True):
    """How far a rank has come.

    Attributes:
        rank: Its number.
        shown: What it shows of itself.
        seconds: Seconds for which it has come no further, less those in which it waited for a CPU or a disk.
    """

    rank: int
    shown: Shown
    seconds: float


class RankStanding:
    """Looks how far a rank has come.

    Args:
        rank: The rank, which has started.
        interval: Seconds between calls of :meth:`check`.
    """

    def __init__(self, rank: Rank, interval: float) -> None:
        self._rank = rank
        self._most_a_check = 2 * interval
        self._seconds = 0.0
        self._moves = -1
        self._ticks = rank.process.cpu_ticks()
        self._checked = time.monotonic()

    def check(self) -> Standing:
        """How far it has come by now."""
        process, shown = self._rank.process, self._rank.progress.waits()
        now, ticks = time.monotonic(), process.cpu_ticks()
        passed, used = now - self._checked, (ticks - self._ticks) / _TICKS
        self._checked, self._ticks = now, ticks
        if shown.moves != self._moves:
            self._moves, self._seconds = shown.moves, 0.0
        else:
            state = process.state()
            if state == "S" and self._seconds >= DOUBTFUL and process.wants_cpu:
                state = "R"  # the main thread waits for one that would compute
            counts = {"R": min(used, passed), "S": passed}.get(state, 0.0)
            self._seconds += min(counts, self._most_a_check)
        return Standing(self._rank.number, shown, self._seconds)


def hung(standings: Sequence[Standing], stage: int, patience: float) -> Standing | None:
    """The rank that hangs, if one does.

    Ranks of a stage compute the same: one hangs that is behind the others by far more than they took, however long a step
    takes. Ranks of different stages compute different things: there a rank is compared with what it took itself for other
    steps. So it is where devices compute: there a rank hangs that is still launching a step which another has launched.

    Args:
        standings: Of all ranks.
        stage: Ranks that compute the same, next to each other; 1: each computes something else.
        patience: Factor of all limits.
    """
    for waiting in standings:
        for rank in standings:
            alike = rank.rank // stage == waiting.rank // stage
            if waiting.shown.launched:
                limit = max(waiting.shown.allowed, rank.shown.allowed)
                behind = _launches_still(rank.shown, waiting.shown)
            else:
                limit = _MARGIN * waiting.shown.last if alike else rank.shown.allowed
                behind = _is_waited_for(rank, waiting, alike=alike)
            if behind and min(rank.seconds, waiting.seconds) >= patience * max(_LEAST_SECONDS, limit):
                return rank
    return None


def stuck(standings: Sequence[Standing], patience: float) -> float | None:
    """Seconds for which no device has come further, where one is waited for that has had all ranks' work for far too long; None:
    there is no such. Which of them is at fault the hosts cannot tell.

    Args:
        standings: Of all ranks.
        patience: Factor of all limits.
    """
    if not any(each.shown.waits_for == DEVICE for each in standings):
        return None
    seconds = min(each.seconds for each in standings)
    limit = max(_LEAST_DEVICE_SECONDS, *(each.shown.allowed for each in standings))
    launched = {each.shown.launched for each in standings}
    return seconds if len(launched) == 1 and seconds >= patience * limit else None


def _launches_still(rank: Shown, other: Shown) -> bool:
    """Whether it has not yet launched a step that another has launched, which does not compute itself."""
    return rank.launched < other.launched and rank.waits_for in (0, AT_REST) and other.waits_for != 0


def _is_waited_for(rank: Standing, waiting: Standing, *, alike: bool) -> bool:
    """Whether another rank waits for it while it waits for nobody, or only for what the waiting ranks have done long ago."""
    wanted = waiting.shown.waits_for
    if wanted in (0, AT_REST) or not wanted >> rank.rank & 1:
        return False
    if rank.shown.waits_for in (0, AT_REST):
        # The leader at rest carries out what operators ask for, which may take long.
        return rank.rank > 0 or rank.shown.waits_for == 0
    return alike and rank.shown.entered < waiting.shown.entered
