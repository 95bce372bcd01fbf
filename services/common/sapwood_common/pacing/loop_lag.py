"""How late an event loop runs what is due: what a process without enough CPU, or with too much to do at once, shows first."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

INTERVAL = 0.1
"""Seconds between two measurements."""
HALF_LIFE = 10.0
"""Seconds after which a measurement counts half."""
MOST = 0.5
"""Seconds that one measurement counts at most: a process that was stopped for a minute is not a slow one."""


class LoopLag:
    """The largest lag of late.

    Args:
        clock: Seconds, monotonic.

    Attributes:
        recent: Seconds; each measurement's lag, halved every :data:`HALF_LIFE` since, whichever is the largest.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.recent = 0.0
        self._clock = clock

    def measured(self, late: float) -> None:
        """What was due ran ``late`` seconds after its time. To be called every :data:`INTERVAL` seconds."""
        faded = self.recent * 0.5 ** (INTERVAL / HALF_LIFE)
        self.recent = max(faded, min(late, MOST))

    async def run(self) -> None:
        """Measures the running loop for ever; cancel it to stop."""
        while True:
            due = self._clock() + INTERVAL
            await asyncio.sleep(INTERVAL)
            self.measured(max(0.0, self._clock() - due))
