"""Children that answer questions: fair places, pauses, ends."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

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


async def test_killed_processes_are_replaced_by_forks_not_by_new_interpreters(make_pool: MakePool) -> None:
    pool = make_pool(size=2)
    running = True

    async def flood() -> None:
        while running:
            task = asyncio.create_task(pool.ask(b"sleep", "eve"))
            await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    floods = [asyncio.create_task(flood()) for _ in range(8)]
    seen = set()
    for _ in range(50):
        seen.add(await asyncio.wait_for(pool.ask(b"parent", "bob"), 60))
    running = False
    await asyncio.gather(*floods)
    assert seen == {str(pool._server._process.pid).encode()}  # type: ignore[union-attr]


async def test_a_fork_server_that_dies_is_replaced(make_pool: MakePool) -> None:
    pool = make_pool(size=1)
    asked = asyncio.create_task(pool.ask(b"sleep"))
    while pool._server is None or not pool._server.greeting.done():
        await asyncio.sleep(0.01)
    os.kill(pool._server._process.pid, 9)
    with pytest.raises(ChildDiedError):
        await asyncio.wait_for(asked, 60)
    while not pool._server.is_dead:
        await asyncio.sleep(0.01)
    assert await pool.ask(b"echo again") == b"again"


async def test_killed_processes_leave_no_zombies(make_pool: MakePool) -> None:
    pool = make_pool(size=1)
    server = int(await pool.ask(b"parent"))
    for _ in range(5):
        with pytest.raises(TimeUpError):
            await pool.ask(b"spin", timeout=0.05)
    children = Path(f"/proc/{server}/task/{server}/children")
    while len(children.read_text().split()) > 1:  # noqa: ASYNC240 - a file of the kernel
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("question", [b"pid", b"sleep", b"spin"])
async def test_a_closed_pool_has_waited_for_all_its_processes(question: bytes) -> None:
    pool = ChildPool("sapwood_testing.child_target", b"set", PoolLimits(size=2, slice_seconds=0.02), "too many")
    server = int(await pool.ask(b"parent"))
    under_way = [asyncio.create_task(pool.ask(question, str(caller))) for caller in range(4)]  # running and paused ones
    await asyncio.sleep(0.1)
    pids = [int(pid) for pid in Path(f"/proc/{server}/task/{server}/children").read_text().split()]  # noqa: ASYNC240
    with _adopting_orphans():
        await pool.close()
        assert pids and not any(Path(f"/proc/{pid}").exists() for pid in [server, *pids])  # noqa: ASYNC240
    await asyncio.gather(*under_way, return_exceptions=True)


@contextlib.contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Meanwhile, processes whose parent has ended are this one's children, which does not wait for them."""
    libc, set_child_subreaper = ctypes.CDLL(None), 36  # linux/prctl.h
    assert libc.prctl(set_child_subreaper, 1, 0, 0, 0) == 0
    yield
    libc.prctl(set_child_subreaper, 0, 0, 0, 0)


async def test_a_caller_that_gives_up_one_question_keeps_its_places(make_pool: MakePool) -> None:
    pool = make_pool(size=2)
    await settled([asyncio.create_task(pool.ask(b"sleep", "alice"))])
    both = [asyncio.create_task(pool.ask(b"sleep", "alice")) for _ in range(2)]
    await asyncio.sleep(0.05)
    assert pool._free == 0
    await settled(both)
