import asyncio

import pytest

from sapwood_net.pacing.afterwards import Afterwards
from sapwood_net.pacing.time_share import SLICE


async def test_a_turn_has_its_time_and_what_is_left_goes_on_in_the_next_ones() -> None:
    now, done = 0.0, []

    def work(number: int) -> None:
        nonlocal now
        now += 0.4 * SLICE
        done.append(number)

    afterwards = Afterwards(lambda: now)
    for number in range(7):
        afterwards.add(lambda number=number: work(number))  # type: ignore[misc]
    counts = []
    for _ in range(4):
        counts.append(len(done))
        await asyncio.sleep(0)
    assert counts == [0, 3, 6, 7]
    assert done == list(range(7))


async def test_what_fails_keeps_nothing_behind_it(caplog: pytest.LogCaptureFixture) -> None:
    done: list[int] = []
    afterwards = Afterwards()
    afterwards.add(lambda: done.extend(1 // 0 for _ in "a"))
    afterwards.add(lambda: done.append(1))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert done == [1]
    assert "ZeroDivisionError" in caplog.text
