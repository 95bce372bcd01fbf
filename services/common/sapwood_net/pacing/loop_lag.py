"""Measures how late an event loop runs what is due: the first sign of too little CPU time, or of too much to do at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

INTERVAL = 0.1
"""Seconds between two measurements."""
HALF_LIFE = 10.0
"""Seconds after which a measurement counts half."""
MOST = 0.5
"""The most seconds that one measurement counts: a process that was stopped for a minute must not pass for a slow one."""


class LoopLag:
    """The largest lag of the last seconds.

    Args:
        clock: Seconds, monotonic.

    Attributes:
        recent: Seconds: the largest of all measured lags, each halved every :data:`HALF_LIFE` seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.recent = 0.0
        self._clock = clock

    def measured(self, late: float) -> None:
        """Takes a measurement: a callback ran ``late`` seconds after it was due. To be called every :data:`INTERVAL` seconds."""
        faded = self.recent * 0.5 ** (INTERVAL / HALF_LIFE)
        self.recent = max(faded, min(late, MOST))

    async def run(self) -> None:
        """Measures the running loop for ever; cancel it to stop."""
        while True:
            due = self._clock() + INTERVAL
            await asyncio.sleep(INTERVAL)
            self.measured(max(0.0, self._clock() - due))
