"""Which rank of a group hangs, by what each shows."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from sapwood_worker.ipc import rank
from sapwood_worker.ipc.rank import Progress, RankProgress, hung, stuck
from sapwood_worker.records.ranks import AT_REST, DEVICE, Shown


def at(
    rank: int,
    waits_for: int,
    seconds: float,
    *,
    entered: int = 7,
    last: float = 0.1,
    allowed: float = 30.0,
    launched: int = 0,
) -> Progress:
    return Progress(rank, Shown(99, entered, waits_for, last, allowed, launched), seconds)


def ahead(rank: int, waits_for: int, launched: int, seconds: float = 2.0, allowed: float = 0.2) -> Progress:
    """A rank whose device computes by itself."""
    return at(rank, waits_for, seconds, allowed=allowed, launched=launched)


COMPUTES = 0


@dataclass
class StillRank:
    """Comes no further; its main thread sleeps."""

    wants_cpu: bool
    number: int = 1
    ticks: int = 0
    shown: Shown = field(default_factory=lambda: Shown(99, 7, COMPUTES, 0.1, 30.0, 0))

    @property
    def process(self) -> StillRank:
        return self

    progress = process

    def waits(self) -> Shown:
        return self.shown

    def cpu_ticks(self) -> int:
        return self.ticks

    def state(self) -> str:
        return "S"


@pytest.mark.parametrize(("wants_cpu", "ticks", "most"), [(False, 0, 9.9), (True, 0, 0.5), (True, 10, 9.9)])
def test_seconds_without_a_cpu_for_an_awaited_thread_do_not_count(
    monkeypatch, wants_cpu: bool, ticks: int, most: float
) -> None:
    """They do where it computes all the time."""
    now = [0.0]
    monkeypatch.setattr(rank.time, "monotonic", lambda: now[0])
    still = StillRank(wants_cpu)
    watched = RankProgress(still, 0.1)
    for _ in range(101):
        now[0] += 0.1
        still.ticks += ticks
        seconds = watched.check().seconds
    assert most - 0.3 < seconds < most + 0.3


@pytest.mark.parametrize(
    ("progress_of_ranks", "stage", "who"),
    [
        ([at(0, 0b10, 2.0), at(1, COMPUTES, 2.0)], 2, 1),
        ([at(0, COMPUTES, 2.0), at(1, 0b01, 2.0)], 2, 0),
        ([at(0, 0b10, 2.0), at(1, COMPUTES, 1.0)], 2, None),  # it has come further since
        ([at(0, 0b10, 1.0), at(1, COMPUTES, 2.0)], 2, None),  # nobody has waited for so long
        ([at(0, 0b10, 2.0, last=0.6), at(1, COMPUTES, 2.0)], 2, None),  # the other took long, too
        ([at(0, 0b10, 2.5, last=0.6), at(1, COMPUTES, 2.5)], 2, 1),
        ([at(0, COMPUTES, 9.0), at(1, COMPUTES, 9.0)], 2, None),  # nobody waits
        ([at(0, AT_REST, 99.0), at(1, AT_REST, 99.0)], 2, None),
        ([at(0, AT_REST, 99.0), at(1, 0b01, 99.0)], 2, None),  # the leader carries out what operators ask for
        ([at(0, 0b10, 2.0), at(1, AT_REST, 2.0)], 2, 1),  # it has not taken the step
        ([at(0, 0b10, 2.0), at(1, 0b01, 2.0)], 2, None),  # they say nothing of each other
        ([at(0, 0b10, 2.0, entered=8), at(1, 0b01, 2.0)], 2, 1),  # the other has left the exchange that it is in
        # Of two stages: rank 3 computes, rank 2 waits for it, and the first stage for what comes back.
        ([at(0, 0b0100, 9.0), at(1, 0b1000, 9.0), at(2, 0b1000, 9.0), at(3, COMPUTES, 9.0)], 2, 3),
        ([at(0, 0b10, 9.0), at(1, COMPUTES, 9.0)], 1, None),  # another stage is compared with itself
        ([at(0, 0b10, 9.0), at(1, COMPUTES, 9.0, allowed=8.0)], 1, 1),
        ([at(0, 0b10, 1.4), at(1, COMPUTES, 1.4, allowed=0.1)], 1, None),
    ],
)
def test_a_rank_hangs_that_others_wait_for_and_that_waits_for_nobody(
    progress_of_ranks: list[Progress], stage: int, who: int | None
) -> None:
    found = hung(progress_of_ranks, stage, 1.0)
    assert (None if found is None else found.rank) == who


def test_after_each_rank_that_hung_all_get_twice_the_time() -> None:
    progress_of_ranks = [at(0, 0b10, 2.9), at(1, COMPUTES, 2.9)]
    assert hung(progress_of_ranks, 2, 1.0) is progress_of_ranks[1]
    assert hung(progress_of_ranks, 2, 2.0) is None


@pytest.mark.parametrize(
    ("progress_of_ranks", "who"),
    [
        ([ahead(0, 0b10, 9), ahead(1, COMPUTES, 8)], 1),  # the leader waits for its report
        ([ahead(0, COMPUTES, 8), ahead(1, 0b01, 9)], 0),
        ([ahead(0, 0b10, 9), ahead(1, DEVICE, 9), ahead(2, COMPUTES, 8)], 2),
        ([ahead(0, DEVICE, 9), ahead(1, AT_REST, 8)], 1),  # it has not taken the step
        ([ahead(0, AT_REST, 9), ahead(1, COMPUTES, 8)], 1),
        ([ahead(0, AT_REST, 9), ahead(1, 0b01, 9)], None),  # the leader carries out what operators ask for
        ([ahead(0, 0b10, 9), ahead(1, COMPUTES, 8, 1.0)], None),  # it has come further since
        ([ahead(0, 0b10, 9, 1.0), ahead(1, COMPUTES, 8)], None),  # nobody has waited for so long
        ([ahead(0, 0b10, 9, allowed=2.5), ahead(1, COMPUTES, 8)], None),  # it has compiled for long itself
        ([ahead(0, 0b10, 9), ahead(1, COMPUTES, 8, allowed=30.0)], None),  # a step as large has never been
        ([ahead(0, COMPUTES, 9), ahead(1, COMPUTES, 8)], None),  # both launch
        ([ahead(0, 0b10, 9), ahead(1, COMPUTES, 9)], None),  # it has launched as much: its device may be waited for
        ([ahead(0, 0b10, 9), ahead(1, DEVICE, 8)], None),
    ],
)
@pytest.mark.parametrize("stage", [1, 2])
def test_of_ranks_with_devices_the_one_still_launching_is_the_hanging_one(
    progress_of_ranks: list[Progress], stage: int, who: int | None
) -> None:
    found = hung(progress_of_ranks, stage, 1.0)
    assert (None if found is None else found.rank) == who


@pytest.mark.parametrize(
    ("progress_of_ranks", "seconds"),
    [
        ([ahead(0, 0b10, 9, 33.0), ahead(1, DEVICE, 9, 31.0)], 31.0),
        ([ahead(0, DEVICE, 9, 31.0), ahead(1, COMPUTES, 9, 40.0)], 31.0),
        ([ahead(0, 0b10, 9, 33.0), ahead(1, DEVICE, 9, 29.0)], None),
        ([ahead(0, 0b10, 9, 33.0), ahead(1, DEVICE, 9, 33.0, allowed=40.0)], None),  # such steps take long
        ([ahead(0, 0b10, 9, 33.0), ahead(1, DEVICE, 8, 33.0)], None),  # one has not launched it
        ([ahead(0, AT_REST, 9, 99.0), ahead(1, 0b01, 9, 99.0)], None),  # no device is waited for
        ([at(0, 0b10, 99.0), at(1, COMPUTES, 99.0)], None),
    ],
)
def test_devices_hang_together_where_all_ranks_have_launched(
    progress_of_ranks: list[Progress], seconds: float | None
) -> None:
    assert stuck(progress_of_ranks, 1.0) == seconds
    assert stuck(progress_of_ranks, 2.0) is None
