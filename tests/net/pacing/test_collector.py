"""The garbage collector looks for cycles in turns of its own."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from sapwood_net.pacing.collector import Collector


class Cycle:
    """Refers to itself."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
async def collecting():
    task = asyncio.create_task(Collector().run())
    await asyncio.sleep(0)
    yield task
    task.cancel()
    await asyncio.wait((task,))
    gc.unfreeze()


async def test_cycles_are_collected_at_many_objects_and_not_while_objects_are_made(collecting) -> None:
    assert not gc.isenabled()
    gone = weakref.ref(Cycle())
    kept = [[number] for number in range(50_000)]
    assert gone() is not None
    async with asyncio.timeout(30):
        while gone() is not None:
            await asyncio.sleep(0.01)
    assert len(kept) == 50_000


async def test_pythons_own_schedule_goes_on_when_it_ends(collecting) -> None:
    collecting.cancel()
    await asyncio.wait((collecting,))
    assert gc.isenabled()
