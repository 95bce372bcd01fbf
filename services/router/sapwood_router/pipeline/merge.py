"""Several runs as one stream of deltas, in the order in which they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from sapwood_router.context import Delta
from sapwood_router.pipeline.pipeline import Run


async def merged(runs: Sequence[Run]) -> AsyncGenerator[tuple[int, Delta], None]:
    """Each delta with its run's index. A run whose delta is not taken waits.

    Raises:
        SapwoodError: One of the runs failed; the caller closes the others.
    """
    if len(runs) == 1:
        while (delta := await runs[0].next()) is not None:
            yield 0, delta
        return
    queue: asyncio.Queue[tuple[int, Delta | Exception | None]] = asyncio.Queue(maxsize=1)

    async def follow(index: int, run: Run) -> None:
        try:
            while (delta := await run.next()) is not None:
                await queue.put((index, delta))
            await queue.put((index, None))
        except Exception as error:
            await queue.put((index, error))

    tasks = [asyncio.ensure_future(follow(index, run)) for index, run in enumerate(runs)]
    left = len(runs)
    try:
        while left:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
