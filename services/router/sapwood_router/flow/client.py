"""The last step of output: a request's generations write their deltas to one client, by whatever API it asked."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from sapwood_common.errors import SapwoodError
from sapwood_net.pacing.heavy_work import A_FEW, Stint
from sapwood_router.request.context import Delta

READER_SLACK = 1.0
"""Seconds past its deadline that a client has to read the answer that says so, at either edge."""


class Source(Protocol):
    """One of the generations that write to a client."""

    async def start(self, client: Client, index: int) -> None:
        """Begins. Each delta has this index; all deltas, and an error, go to ``client``."""
        ...

    def flush(self) -> None:
        """Writes the output that waits, if the client is ready."""
        ...


class Client(ABC):
    """Who asked, and the task that awaits the end of the answer. Each API has a subclass that writes.

    Deltas are written in the callbacks that bring them, because waking a task costs more than all else that is done for a
    delta. The task in :meth:`carry` is woken only if the client reads slowly, if something has to be awaited before a delta can
    be sent, and at the end.

    Args:
        stint: Where there are very many generations, the turns of what is done for those that had to wait.
    """

    def __init__(self, stint: Stint | None = None) -> None:
        self._stint = stint
        self._left = 0
        self._behind: dict[int, None] = {}
        """Generations that were asked to wait and not yet to continue. The client may be ready again before the task is awake."""
        self._error: SapwoodError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @abstractmethod
    def writable(self) -> bool:
        """Whether :meth:`write` may be called."""

    @abstractmethod
    async def drained(self) -> None:
        """Returns once :meth:`writable`; sends what :meth:`write` has put off.

        Raises:
            CancelledError, SapwoodError: The client is gone.
        """

    @abstractmethod
    def write(self, delta: Delta) -> bool:
        """Takes a delta; returns False if :meth:`drained` has to send it. Must not raise."""

    async def carry(self, sources: Sequence[Source]) -> None:
        """Starts the generations and returns once the client has all of their output.

        Raises:
            SapwoodError: One of them failed; the caller closes the others.
        """
        self._left = len(sources)
        if len(sources) == 1:
            await sources[0].start(self, 0)
        else:
            # A few at a time: all together would block the event loop until each of them waits.
            for first in range(0, len(sources), A_FEW):
                if self._error is None:
                    part = enumerate(sources[first : first + A_FEW], first)
                    await asyncio.gather(*(source.start(self, index) for index, source in part))
        while True:
            if self._behind or not self.writable():
                if self._stint is not None and self._stint.over:
                    await self._stint.turn()
                await self.drained()
                while self._behind and self.writable():
                    index = next(iter(self._behind))
                    del self._behind[index]
                    sources[index].flush()
            elif self._error is not None:
                try:
                    raise self._error
                finally:
                    # Its traceback refers to this frame: a cycle that only the garbage collector would free.
                    self._error = None
            elif not self._left:
                return
            else:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
                self._waiter = None

    def postpone(self, index: int) -> None:
        """A generation has output while the client is not :meth:`writable`: it merges its output until ``flush``."""
        self._behind[index] = None
        self._wake()

    def take(self, delta: Delta) -> None:
        """Takes the next delta, while :meth:`writable`; a generation's last one has a finish."""
        if delta.finish is not None:
            self._left -= 1
        if not self.write(delta) or not self._left:
            self._wake()

    def failed(self, error: SapwoodError) -> None:
        """A generation failed: nothing more comes of it. :meth:`carry` raises the first error of all."""
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
