"""What was freed goes back to the system, once it is much."""

from __future__ import annotations

import asyncio

from sapwood_common.errors import SapwoodError
from sapwood_net.pacing import memory_trim
from sapwood_net.pacing.body_memory import BodyMemory
from sapwood_net.pacing.memory_trim import MemoryTrim

MB = 1 << 20


class Body:
    """One that may be given up."""

    def fail(self, error: SapwoodError) -> None:
        pass


async def trimmed(trim: MemoryTrim) -> int:
    while trim.is_due:
        await asyncio.sleep(0)
    return trim.trims


async def test_memory_is_trimmed_once_soon_after_much_was_freed(monkeypatch) -> None:
    monkeypatch.setattr(memory_trim, "_SOON", 0.0)
    trim = MemoryTrim()
    memory, body = BodyMemory(256 * MB, trim.freed), Body()
    memory.grow(body, 100 * MB)
    memory.shrink(body, 10 * MB)  # which alone would be trimmed later
    memory.shrink(body, 30 * MB)
    memory.release(body)
    memory.release(body)
    assert await trimmed(trim) == 1


async def test_what_is_freed_after_that_goes_back_too_but_for_little(monkeypatch) -> None:
    monkeypatch.setattr(memory_trim, "_LATER", 0.0)
    trim = MemoryTrim()
    memory, body = BodyMemory(256 * MB, trim.freed), Body()
    for freed, trims in ((MB // 2, 0), (MB // 2, 1), (MB // 2, 1), (10 * MB, 2)):
        memory.grow(body, freed)
        memory.release(body)
        assert await trimmed(trim) == trims
