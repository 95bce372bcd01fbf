"""How late the load generator itself is: its event loop, and the share of a core that it takes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from types import TracebackType
from typing import Self

from sapwood.bench.targets.record import clock

_INTERVAL = 0.01


class LagMeter:
    """Sleeps ten milliseconds again and again while the block runs, and notes how much later it woke.

    Attributes:
        lateness: Seconds, one for each sleep.
        busy: The share of the time in which the event loop's thread computed, 0 to 1; near 1 it is what limits the load.
    """

    def __init__(self) -> None:
        self.lateness: list[float] = []
        self.busy = 0.0
        self._task: asyncio.Task[None] | None = None
        self._began = (0.0, 0.0)

    async def __aenter__(self) -> Self:
        self._began = clock(), time.thread_time()
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        wall, used = self._began
        self.busy = (time.thread_time() - used) / max(clock() - wall, 1e-9)
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _run(self) -> None:
        while True:
            due = clock() + _INTERVAL
            await asyncio.sleep(_INTERVAL)
            self.lateness.append(max(0.0, clock() - due))
