"""A peer's silence, and one's own lateness, on a clock that the test moves."""

import asyncio

import pytest

from sapwood_net.pacing.loop_lag import HALF_LIFE, INTERVAL, MOST, LoopLag
from sapwood_net.pacing.silence import Silence
from sapwood_testing.clock import Clock


def test_silence_is_counted_but_not_while_one_stood_still_oneself() -> None:
    clock = Clock()
    silence = Silence(0.1, clock)
    clock.now = 60.0  # stopped for a minute
    assert silence.check() == pytest.approx(0.2)
    for count in range(1, 8):
        clock.now += 0.1
        assert silence.check() == pytest.approx(0.2 + 0.1 * count)
    silence.heard()
    for count in range(1, 10):
        clock.now += 0.1
        assert silence.check() == pytest.approx(0.1 * count)


def test_the_largest_lag_counts_and_fades() -> None:
    lag = LoopLag(Clock())
    lag.measured(0.3)
    lag.measured(0.02)
    assert lag.recent == pytest.approx(0.3, rel=0.01)
    for _ in range(round(HALF_LIFE / INTERVAL)):
        lag.measured(0.02)
    assert lag.recent == pytest.approx(0.15, rel=0.02)
    for _ in range(round(10 * HALF_LIFE / INTERVAL)):
        lag.measured(0.02)
    assert lag.recent == 0.02


def test_one_that_was_stopped_for_a_minute_is_not_taken_for_that_slow() -> None:
    lag = LoopLag(Clock())
    lag.measured(60.0)
    assert lag.recent == MOST


async def test_silence_is_measured_on_the_loop_that_runs_the_check() -> None:
    clock = Clock()
    lag = LoopLag(clock)
    measuring = asyncio.create_task(lag.run())
    await asyncio.sleep(0)
    clock.now += INTERVAL + 0.25
    while not lag.recent:
        await asyncio.sleep(0.01)
    assert lag.recent == pytest.approx(0.25)
    measuring.cancel()
