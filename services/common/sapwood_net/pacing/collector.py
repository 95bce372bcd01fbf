"""When Python's garbage collector looks for cycles: in a turn of its own, and not in the middle of a request."""

from __future__ import annotations

import asyncio
import gc

_INTERVAL = 0.005
"""Seconds between looks at how many objects there are."""
_MOST_YOUNG = 8_000
"""New objects that are still alive beyond which the collector looks through them, which takes 2 to 5 ms. It does not wait for
other work to end: thousands of objects may be made meanwhile."""
_YOUNG, _RECENT, _ALL = range(3)
_ALL_EACH = 750
"""One in this many collections looks at all objects that were made since the start."""


class Collector:
    """Runs Python's garbage collector, whose own schedule is switched off: with its usual thresholds it took an eighth of the
    router's CPU time, with others it ran for 5 to 20 ms in the middle of parsing a large body.

    A request makes hundreds of containers and hardly a cycle. So an object that survives one look is not looked at again soon,
    while Python's own schedule looks at it in two more generations.
    """

    def __init__(self) -> None:
        self._count = 0

    async def run(self) -> None:
        """Collects for ever; cancel it to stop, whereupon Python's own schedule continues.

        Objects that exist at the start stay and are never collected.
        """
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            while True:
                await asyncio.sleep(_INTERVAL)
                if gc.get_count()[_YOUNG] > _MOST_YOUNG:
                    self._count += 1
                    gc.collect(_RECENT if self._count % _ALL_EACH else _ALL)
        finally:
            gc.enable()
