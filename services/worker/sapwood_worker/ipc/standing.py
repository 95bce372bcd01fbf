"""Which rank of a group hangs: the others wait for it, it waits for nobody, and it comes no further."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import msgspec

from sapwood_worker.ipc.rank import Rank
from sapwood_worker.records.ranks.waits import AT_REST, Shown

_TICKS = os.sysconf("SC_CLK_TCK")
_LEAST_SECONDS = 1.5
"""Seconds that a rank may always take, whatever the others took."""
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
            counts = {"R": min(used, passed), "S": passed}.get(process.state(), 0.0)
            self._seconds += min(counts, self._most_a_check)
        return Standing(self._rank.number, shown, self._seconds)


def hung(standings: Sequence[Standing], stage: int, patience: float) -> Standing | None:
    """The rank that hangs, if one does.

    Ranks of a stage compute the same: one that is behind the others by far more than they took hangs, however long a step takes.
    Of ranks that compute different things, as those of two stages do, it is compared with what it took itself for other steps.

    Args:
        standings: Of all ranks.
        stage: Ranks that compute the same, next to each other; 1: each computes something else.
        patience: Factor of all limits.
    """
    for waiting in standings:
        wanted = waiting.shown.waits_for
        if wanted in (0, AT_REST):
            continue
        for rank in standings:
            if not wanted >> rank.rank & 1:
                continue
            alike = rank.rank // stage == waiting.rank // stage
            limit = patience * max(_LEAST_SECONDS, _MARGIN * waiting.shown.last if alike else rank.shown.allowed)
            if min(rank.seconds, waiting.seconds) >= limit and _is_behind(rank, waiting, alike=alike):
                return rank
    return None


def _is_behind(rank: Standing, waiting: Standing, *, alike: bool) -> bool:
    """Whether it waits for nobody, or for what those who wait for it have done long ago."""
    if rank.shown.waits_for in (0, AT_REST):
        # The leader at rest carries out what operators ask for, which may take long.
        return rank.rank > 0 or rank.shown.waits_for == 0
    return alike and rank.shown.entered < waiting.shown.entered
