"""What was freed goes back to the system, once it is much."""

from __future__ import annotations

import asyncio

from sapwood_common.errors import SapwoodError
from sapwood_common.pacing import memory_trim
from sapwood_common.pacing.body_memory import BodyMemory
from sapwood_common.pacing.memory_trim import MemoryTrim

MB = 1 << 20


class Body:
    """One that may be given up."""

    def fail(self, error: SapwoodError) -> None:
        pass


async def test_it_trims_once_after_much_was_freed_and_not_for_little(monkeypatch) -> None:
    monkeypatch.setattr(memory_trim, "_DELAY", 0.0)
    trim = MemoryTrim()
    memory, body = BodyMemory(256 * MB, trim.freed), Body()
    memory.grow(body, 100 * MB)
    memory.shrink(body, 10 * MB)
    assert not trim.is_due
    memory.shrink(body, 30 * MB)
    memory.release(body)
    memory.release(body)
    assert trim.is_due
    while trim.is_due:
        await asyncio.sleep(0)
    assert trim.trims == 1
    memory.grow(body, 10 * MB)
    memory.release(body)
    assert not trim.is_due
