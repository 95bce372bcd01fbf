"""When a worker of `sapwood up` is started again."""

from __future__ import annotations

from sapwood.cli.local.cluster import MOST, WINDOW, Restarts
from sapwood_testing.clock import Clock


def test_each_restart_waits_longer_and_after_too_many_there_is_none() -> None:
    restarts = Restarts(Clock())
    assert [restarts.next_delay() for _ in range(MOST + 2)] == [0.5, 1.0, 2.0, 4.0, 8.0, None, None]


def test_who_ran_well_for_long_begins_again() -> None:
    clock = Clock()
    restarts = Restarts(clock)
    for _ in range(MOST):
        restarts.next_delay()
    clock.now = WINDOW - 1
    assert restarts.next_delay() is None
    clock.now = WINDOW + 1
    assert restarts.next_delay() == 0.5
