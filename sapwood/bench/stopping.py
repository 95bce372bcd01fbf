"""Work that can be stopped before its end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

Found = TypeVar("Found")


async def unless_stopped(work: Coroutine[None, None, Found], stop: asyncio.Event) -> Found | None:
    """The result of the work; None if ``stop`` was set before: the work is then cancelled. Raises what the work raises."""
    task, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.wait((task,))
        return None
    finally:
        task.cancel()
        stopped.cancel()
