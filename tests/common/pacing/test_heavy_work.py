"""Heavy work has the event loop one piece at a time, each caller's in turn, with a rest after each."""

from __future__ import annotations

import asyncio

import pytest

from sapwood_common.pacing.heavy_work import HeavyWork


class Clock:
    """Seconds that pass where a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_who_is_alone_waits_for_nothing() -> None:
    heavy, began = HeavyWork(Clock()), []

    async def work() -> None:
        await heavy.turn()
        began.append(True)

    coroutine = work()
    with pytest.raises(StopIteration):
        coroutine.send(None)  # it is done without a wait
    assert began
    await turns()


async def test_one_piece_a_turn_of_the_loop_and_callers_take_turns() -> None:
    heavy, order = HeavyWork(Clock()), []

    async def work(caller: str, number: int) -> None:
        await heavy.turn(caller)
        assert not running
        running.append(number)
        order.append((caller, number))
        asyncio.get_running_loop().call_soon(running.clear)

    running: list[int] = []
    await asyncio.gather(*(work(caller, number) for number, caller in enumerate("aaaabb")))
    assert order == [("a", 0), ("a", 1), ("b", 4), ("a", 2), ("b", 5), ("a", 3)]
    assert heavy.waiting == 0


async def test_after_a_long_piece_nothing_heavy_begins_for_several_times_as_long() -> None:
    clock, began = Clock(), []
    heavy = HeavyWork(clock, rest=3.0)

    async def work(seconds: float) -> None:
        await heavy.turn()
        began.append(seconds)
        clock.now += seconds

    short, long, next_one = (asyncio.create_task(work(seconds)) for seconds in (0.0005, 1000.0, 1.0))
    await short
    await long
    await turns()
    assert began == [0.0005, 1000.0]
    assert heavy.waiting == 1
    next_one.cancel()
    await turns()
    assert began == [0.0005, 1000.0]


async def test_a_turn_goes_past_those_who_left() -> None:
    heavy, began = HeavyWork(Clock()), []

    async def work(number: int) -> None:
        await heavy.turn(number)
        began.append(number)

    tasks = [asyncio.create_task(work(number)) for number in range(4)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    tasks[2].cancel()
    await asyncio.wait(tasks)
    assert began == [0, 3]
    assert heavy.waiting == 0
