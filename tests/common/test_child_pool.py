"""Children that answer questions: fair places, pauses, ends."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable

import pytest

from sapwood_common.child_pool import ChildDiedError, ChildPool, PoolLimits, TimeUpError
from sapwood_common.errors import ResourceExhaustedError

MakePool = Callable[..., ChildPool]


@pytest.fixture
async def make_pool() -> AsyncIterator[MakePool]:
    made: list[ChildPool] = []

    def make(**limits: object) -> ChildPool:
        made.append(ChildPool("sapwood_testing.child_target", b"set", PoolLimits(**limits), "too many"))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for pool in made:
        await pool.close()


async def settled(tasks: list[asyncio.Task[bytes]]) -> list[object]:
    for task in tasks:
        task.cancel()
    return await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_process_is_greeted_and_used_again(make_pool: MakePool) -> None:
    pool = make_pool(size=1)
    assert await pool.start() == b"hello set"
    first, second = [await pool.ask(b"pid") for _ in range(2)]
    assert first == second
    large = b"x" * 3_000_000
    assert await pool.ask(b"echo " + large) == large


@pytest.mark.parametrize("question", [b"exit", b"memory", b"cpu"])
async def test_a_process_that_dies_of_a_question_is_replaced(make_pool: MakePool, question: bytes) -> None:
    pool = make_pool(size=1, memory_bytes=100 << 20, cpu_seconds=1)
    before = await pool.ask(b"pid")
    with pytest.raises(ChildDiedError):
        await pool.ask(question)
    assert await pool.ask(b"pid") != before


async def test_a_process_that_died_between_questions_is_replaced(make_pool: MakePool) -> None:
    pool = make_pool(size=1)
    os.kill(int(await pool.ask(b"pid")), 9)
    await asyncio.sleep(0.1)
    assert await pool.ask(b"pid")


async def test_a_question_is_ended_at_its_deadline(make_pool: MakePool) -> None:
    pool = make_pool(size=1)
    with pytest.raises(TimeUpError) as caught:
        await pool.ask(b"sleep", timeout=0.2)
    assert caught.value.ran > caught.value.waited
    assert await pool.ask(b"pid")


async def test_a_tenant_with_endless_questions_delays_no_other(make_pool: MakePool) -> None:
    pool = make_pool(size=2, most_paused=4, slice_seconds=0.02)
    endless = [asyncio.create_task(pool.ask(b"spin", "alice")) for _ in range(40)]
    await asyncio.sleep(0.1)
    for _ in range(5):
        assert await asyncio.wait_for(pool.ask(b"echo 1", "bob"), 60) == b"1"
        assert await asyncio.wait_for(pool.ask(b"echo 2", "carol"), 60) == b"2"
    assert not any(task.done() for task in endless)
    assert sum(len(line.paused) for line in pool._lines.values()) <= 4
    await settled(endless)
    assert await pool.ask(b"echo 3", "alice") == b"3"


async def test_a_slow_question_of_a_tenant_is_answered_beside_endless_ones(make_pool: MakePool) -> None:
    pool = make_pool(size=1, slice_seconds=0.02)
    endless = [asyncio.create_task(pool.ask(b"spin", name)) for name in ("alice", "alice", "bob")]
    assert await asyncio.wait_for(pool.ask(b"work 0.2", "carol"), 120) == b"done"
    await settled(endless)


async def test_long_questions_of_one_tenant_end_one_after_the_other(make_pool: MakePool) -> None:
    pool = make_pool(size=1, most_paused=2, slice_seconds=0.02)
    long = [asyncio.create_task(pool.ask(b"work 0.15", "alice")) for _ in range(6)]
    await asyncio.sleep(0.1)
    assert await pool.ask(b"echo quick", "alice") == b"quick"
    assert await asyncio.wait_for(asyncio.gather(*long), 120) == [b"done"] * 6


async def test_the_reason_of_a_question_that_had_no_place_is_its_wait(make_pool: MakePool) -> None:
    pool = make_pool(size=1, slice_seconds=600.0)
    endless = asyncio.create_task(pool.ask(b"spin", "alice"))
    await asyncio.sleep(0.1)
    with pytest.raises(TimeUpError) as caught:
        await pool.ask(b"pid", "bob", timeout=0.2)
    assert caught.value.ran == 0.0 < caught.value.waited
    await settled([endless])


async def test_a_full_queue_refuses_the_tenant_with_most_questions(make_pool: MakePool) -> None:
    pool = make_pool(size=1, max_queued=4, slice_seconds=600.0)
    alices = [asyncio.create_task(pool.ask(b"spin", "alice")) for _ in range(5)]
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhaustedError) as caught:
        await pool.ask(b"pid", "alice")
    assert caught.value.retry_after is not None
    bob = asyncio.create_task(pool.ask(b"pid", "bob"))
    while not any(task.done() for task in alices):
        await asyncio.sleep(0)
    assert [task.done() for task in alices] == [False] * 4 + [True], "the newest made room"
    alices[0].cancel()
    assert await asyncio.wait_for(bob, 60)
    await settled(alices)


async def test_closing_ends_a_question_that_is_under_way(make_pool: MakePool) -> None:
    pool = make_pool(size=1)
    await pool.start()
    asked = asyncio.create_task(pool.ask(b"sleep"))
    await asyncio.sleep(0.05)
    await pool.close()
    with pytest.raises(ChildDiedError):
        await asked


async def test_a_caller_that_gives_questions_up_leaves_a_place_and_a_process_to_others(make_pool: MakePool) -> None:
    pool = make_pool(size=2)
    running, most = True, 0

    async def flood() -> None:
        while running:
            task = asyncio.create_task(pool.ask(b"sleep", "eve"))
            await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    floods = [asyncio.create_task(flood()) for _ in range(8)]
    await asyncio.sleep(0.5)
    mine = await pool.ask(b"pid", "bob")  # the first of the flood may have cost the process that was ready
    for _ in range(20):
        assert await asyncio.wait_for(pool.ask(b"pid", "bob"), 60) == mine, "it waited for a new process"
        most = max(most, pool._places_of_killers)
    running = False
    await asyncio.gather(*floods)
    assert most == 1
    assert pool._places_of_killers == 0 and pool._free == 2
    assert await pool.ask(b"echo 1", "eve") == b"1", "it is still answered"


async def test_a_caller_that_gives_up_one_question_keeps_its_places(make_pool: MakePool) -> None:
    pool = make_pool(size=2)
    await settled([asyncio.create_task(pool.ask(b"sleep", "alice"))])
    both = [asyncio.create_task(pool.ask(b"sleep", "alice")) for _ in range(2)]
    await asyncio.sleep(0.05)
    assert pool._free == 0
    await settled(both)
