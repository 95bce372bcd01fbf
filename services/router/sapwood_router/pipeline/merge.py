"""Several runs as one stream of deltas, in the order in which they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Protocol

from sapwood_router.context import Delta
from sapwood_router.pipeline.pipeline import Run


class Deltas(Protocol):
    """Deltas with their runs' indices, to be closed by who iterates."""

    def __aiter__(self) -> AsyncIterator[tuple[int, Delta]]: ...

    async def __anext__(self) -> tuple[int, Delta]: ...

    async def aclose(self) -> None:
        """Nobody iterates on."""
        ...


def merged(runs: Sequence[Run]) -> Deltas:
    """Each delta with its run's index. A run whose delta is not taken waits.

    Raises:
        SapwoodError: One of the runs failed; the caller closes the others.
    """
    return _One(runs[0]) if len(runs) == 1 else _merged(runs)


class _One:
    """The usual: a generator would cost more than all it does."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __aiter__(self) -> _One:
        return self

    async def __anext__(self) -> tuple[int, Delta]:
        delta = await self._run.next()
        if delta is None:
            raise StopAsyncIteration
        return 0, delta

    async def aclose(self) -> None:
        """See Deltas."""


async def _merged(runs: Sequence[Run]) -> AsyncGenerator[tuple[int, Delta], None]:
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
