"""Who has too much to do continues later, in turn with others, and holds up nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from sapwood_net.pacing.time_share import SLICE, TimeShare
from sapwood_testing.clock import Clock


class Worker:
    """Has so many steps to do, each of which takes 0.4 of a slice, and writes its name down for each."""

    def __init__(self, name: str, steps: int, clock: Clock, done: list[str], step: float = 0.4 * SLICE) -> None:
        self.name, self.steps, self.clock, self.done, self.step = name, steps, clock, done, step

    def go_on(self, until: float) -> bool:
        while self.steps and self.clock() < until:
            self.steps -= 1
            self.clock.now += self.step
            self.done.append(self.name)
        return bool(self.steps)


async def test_workers_take_turns_and_a_turn_of_the_loop_holds_one_slice() -> None:
    clock, done = Clock(100.0), []
    share = TimeShare(clock)
    for name in "abc":
        share.add(Worker(name, 6, clock, done))
    turns = []
    while share.waiting:
        before = clock.now
        await asyncio.sleep(0)
        turns.append(clock.now - before)
    assert "".join(done) == "aaabbbccc" * 2
    assert max(turns) < 1.5 * SLICE
    await asyncio.sleep(0)
    share.add(Worker("d", 1, clock, done))  # it begins again
    await asyncio.sleep(0)
    assert done[-1] == "d"


async def test_who_has_little_left_leaves_the_turn_to_the_next() -> None:
    clock, done = Clock(100.0), []
    share = TimeShare(clock)
    for name in "abc":
        share.add(Worker(name, 1, clock, done))
    await asyncio.sleep(0)
    assert done == ["a", "b", "c"]
    assert not share.waiting


async def test_who_is_added_twice_waits_once_and_who_is_gone_not_at_all() -> None:
    clock, done = Clock(100.0), []
    share = TimeShare(clock)
    first, second = Worker("a", 1, clock, done), Worker("b", 1, clock, done)
    for worker in (first, second, first):
        share.add(worker)
    share.drop(second)
    share.drop(second)
    for _ in range(3):
        await asyncio.sleep(0)
    assert done == ["a"]


async def test_who_comes_with_little_does_not_wait_for_a_thousand_that_have_little_too() -> None:
    clock, done = Clock(100.0), []
    share = TimeShare(clock)
    for number in range(1000):
        share.add(Worker(f"old {number}", 1, clock, done), light=True)
    share.add(Worker("heavy", 1, clock, done))
    share.add(Worker("new", 1, clock, done), light=True)
    await asyncio.sleep(0)
    assert done[:2] == ["new", "old 0"]
    assert "heavy" in done
    while share.waiting:
        await asyncio.sleep(0)
    assert len(done) == 1002
    assert done.index("old 1") < done.index("old 990")  # every second turn is the oldest's


async def test_a_step_that_took_far_too_long_leaves_as_much_time_to_others(monkeypatch) -> None:
    later: list[tuple[float, Callable[[], None]]] = []
    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", lambda delay, turn: later.append((delay, turn)))
    clock, done = Clock(100.0), []
    share = TimeShare(clock)
    share.add(Worker("long", 2, clock, done, step=20 * SLICE))
    for _ in range(10):
        await asyncio.sleep(0)
    assert done == ["long"]  # the second only after a while
    ((delay, turn),) = later
    assert delay == pytest.approx(20 * SLICE)
    turn()
    assert done == ["long", "long"]
    assert not share.waiting


def spend(share: TimeShare, clock: Clock, seconds: float) -> bool:
    """Works on what was just read; whether it had to stop."""
    began = clock.now
    while not (over := share.is_over()) and clock.now < began + seconds:
        clock.now += SLICE / 10
    share.end()
    return over


def test_what_was_just_read_has_a_slice_and_all_together_half_of_the_time() -> None:
    clock = Clock(100.0)
    share = TimeShare(clock)
    assert not spend(share, clock, 0.5 * SLICE)
    assert spend(share, clock, 2 * SLICE)
    stopped_at_once = 0
    for _ in range(20):  # of one turn
        before = clock.now
        assert spend(share, clock, 2 * SLICE)
        stopped_at_once += clock.now == before
    assert stopped_at_once > 10
    clock.now += 20 * SLICE
    assert not spend(share, clock, 0.5 * SLICE)


async def test_strangers_rest_three_times_as_long_as_they_work(monkeypatch) -> None:
    clock, done = Clock(100.0), []
    share = TimeShare(clock, rest=3.0)
    rests = []

    def schedule(delay: float) -> None:
        rests.append(max(0.0, delay))
        clock.now += rests[-1]
        asyncio.get_running_loop().call_soon(share._turn)

    monkeypatch.setattr(share, "_schedule", schedule)
    began = clock.now
    share.add(Worker("a", 30, clock, done))
    while share.waiting:
        await asyncio.sleep(0)
    worked = 30 * 0.4 * SLICE
    assert sum(rests) == pytest.approx(clock.now - began - worked)
    assert sum(rests) > 2.5 * worked
    clock.now += SLICE
    rests.clear()
    share.add(Worker("b", 1, clock, done))  # who comes within the rest waits for its end
    assert rests == [pytest.approx(3 * 1.2 * SLICE - SLICE)]
    await asyncio.sleep(0)
    assert done[-1] == "b"


async def test_strangers_have_an_eighth_of_the_time_for_what_they_have_just_sent() -> None:
    clock = Clock(100.0)
    share = TimeShare(clock, rest=3.0)
    begun = clock.now
    worked = 0.0
    for _ in range(1000):
        before = clock.now
        while not share.is_over():
            clock.now += 0.4 * SLICE
        share.end()
        worked += clock.now - before
        clock.now += SLICE
    assert worked < (clock.now - begun) / 8 + 5 * SLICE


async def test_who_has_little_goes_before_those_with_much_who_are_not_forgotten() -> None:
    clock, done = Clock(100.0), []
    share = TimeShare(clock)
    for _ in range(3):
        share.add(Worker("h", 30, clock, done))
    light = [Worker("l", 1, clock, done) for _ in range(30)]
    for worker in light:
        share.add(worker, light=True)
    await asyncio.sleep(0)
    assert done[0] == "l"
    while "l" in done[-6:] or done.count("l") < len(light):
        await asyncio.sleep(0)
    last = len(done) - done[::-1].index("l")
    assert done[:last].count("l") == len(light)
    assert 0.2 * last < done[:last].count("h") < 0.6 * last


async def test_who_has_much_already_does_not_go_ahead_with_a_little_more() -> None:
    clock, done = Clock(100.0), []
    share = TimeShare(clock)
    greedy, light = Worker("h", 6, clock, done), Worker("l", 1, clock, done)
    share.add(greedy)
    share.add(greedy, light=True)
    share.add(light, light=True)
    while share.waiting:
        await asyncio.sleep(0)
    assert done == ["l", *"hhhhhh"]
    share.add(light, light=True)
    share.drop(light)
    assert not share.waiting
