"""Heavy work has the event loop one piece at a time, each caller's in turn, with a rest after each."""

from __future__ import annotations

import asyncio

import pytest

from sapwood_net.pacing.heavy_work import HeavyWork


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


async def test_what_has_begun_goes_before_what_its_caller_has_yet_to_begin() -> None:
    """Else all that a caller asks for would be half done, and in memory, at the same time."""
    heavy, order = HeavyWork(Clock()), []

    async def work(name: str) -> None:
        stint = heavy.stint("a", begun=False)
        for piece in range(3):
            await stint.turn()
            order.append((name, piece))

    await asyncio.gather(work("one"), work("two"))
    assert order == [(name, piece) for name in ("one", "two") for piece in range(3)]


async def test_among_what_has_begun_who_came_first_is_first() -> None:
    heavy, order = HeavyWork(Clock()), []

    async def work(name: str) -> None:
        stint = heavy.stint("a")
        for piece in range(3):
            await stint.turn()
            order.append((name, piece))

    await asyncio.gather(*(work(name) for name in ("one", "two", "three")))
    # The first begins at once, and waits again before the others have come.
    assert order == [
        ("one", 0), ("one", 1), ("two", 0), ("three", 0), ("one", 2), ("two", 1), ("three", 1), ("two", 2), ("three", 2),
    ]  # fmt: skip


@pytest.mark.parametrize(("took", "rest"), [(0.0005, 0.0), (0.002, 0.002), (0.004, 0.008), (0.016, 0.128), (9.0, 0.5)])
async def test_a_caller_rests_by_the_square_of_its_piece_and_others_do_not(took, rest) -> None:
    clock, times = Clock(), {}
    heavy, loop = HeavyWork(clock, rest=0.0), asyncio.get_running_loop()

    async def work(caller: str, seconds: float) -> None:
        await heavy.turn(caller)
        times.setdefault(caller, []).append(loop.time())
        clock.now += seconds

    await work("a", took)
    await asyncio.gather(work("a", 0.0), work("b", 0.0))
    first, second = times["a"]
    assert second - first >= rest - 0.001  # uvloop's clock counts milliseconds
    assert times["b"][0] <= second or not rest


async def test_a_caller_that_rests_alone_has_its_turn_in_the_end() -> None:
    clock = Clock()
    heavy = HeavyWork(clock)
    for _ in range(3):
        await asyncio.wait_for(heavy.turn("a"), 10)
        clock.now += 0.01
    assert heavy.waiting == 0
