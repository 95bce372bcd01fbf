"""A timer that is set again."""

from __future__ import annotations

import asyncio

from sapwood_net.pacing.timer import Timer


async def test_only_what_a_timer_was_started_with_last_is_called() -> None:
    called: list[str] = []
    over = asyncio.Event()

    def note(what: str) -> None:
        called.append(what)
        over.set()

    timer = Timer()
    timer.start(0, note, "first")
    timer.start(0, note, "second")
    assert timer.running
    await over.wait()
    assert called == ["second"]
    assert not timer.running


async def test_a_timer_may_be_started_again_by_what_it_calls() -> None:
    over = asyncio.Event()
    timer = Timer()

    def count(left: int) -> None:
        if left:
            timer.start(0, count, left - 1)
            assert timer.running
        else:
            over.set()

    timer.start(0, count, 3)
    await over.wait()
    assert not timer.running


async def test_a_stopped_timer_calls_nothing() -> None:
    called: list[str] = []
    timer = Timer()
    timer.start(0, called.append, "stopped")
    timer.stop()
    timer.stop()
    passed = asyncio.Event()
    asyncio.get_running_loop().call_later(0.001, passed.set)
    await passed.wait()
    assert not called and not timer.running
