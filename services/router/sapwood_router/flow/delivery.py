"""The last step of output: a request's runs push their deltas to one client, whatever edge it came by."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from sapwood_common.errors import SapwoodError
from sapwood_net.pacing.heavy_work import A_FEW, Stint
from sapwood_router.request.context import Delta
from sapwood_router.request.output_stream import Relay

READER_SLACK = 1.0
"""Seconds past its deadline that a client has to read the answer that says so, at either edge."""


class Sink(Protocol):
    """Takes runs' output on to their client. Called from callbacks of the event loop: nothing here waits."""

    def ready(self, index: int) -> bool:
        """Whether the client takes a delta of this run now. If not, it merges its output until ``Run.flush`` is called."""
        ...

    def delta(self, index: int, delta: Delta) -> None:
        """Takes the next delta of a run, while :meth:`ready`; the run's last one has a finish."""
        ...

    def token_writer(self, index: int) -> Relay | None:
        """A function that sends one token id without a delta; None: ask again after the next delta."""
        ...

    def failed(self, error: SapwoodError) -> None:
        """A run failed: nothing more comes of it."""
        ...


class Flow(Protocol):
    """One of a client's runs."""

    async def start(self, sink: Sink, index: int) -> None:
        """Begins; all that comes of it, also an error, goes to ``sink`` under this index."""
        ...

    def flush(self) -> None:
        """Hands over what waits, if ``sink`` is ready."""
        ...


class Client(Protocol):
    """What an edge has to say of its client."""

    def writable(self) -> bool:
        """Whether :meth:`write` may be called."""
        ...

    async def drained(self) -> None:
        """Returns once :meth:`writable`; does what :meth:`write` has put off.

        Raises:
            CancelledError, SapwoodError: The client is gone.
        """
        ...

    def write(self, index: int, delta: Delta) -> bool:
        """Takes a delta; returns False if it is not on its way yet: :meth:`drained` sends it. Must not raise."""
        ...

    def token_writer(self, index: int) -> Relay | None:
        """A function that sends one token id without a delta; None: ask again after the next delta."""
        ...


class Delivery:
    """A :class:`Sink`, and the task that awaits its end.

    Deltas are written in the callbacks that bring them, because waking a task costs more than all else that is done for a
    delta. The task in :meth:`carry` is woken only if the client reads slowly, if something has to be awaited before a delta can
    be sent, and at the end.

    Args:
        client: Writes.
        stint: Where there are very many runs, the turns of what is done for those that had to wait.
    """

    def __init__(self, client: Client, stint: Stint | None = None) -> None:
        self._client = client
        self._stint = stint
        self._left = 0
        self._behind: dict[int, None] = {}
        """Runs that were told to wait and not yet to go on. The client may be ready again before the task is awake."""
        self._error: SapwoodError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def carry(self, runs: Sequence[Flow]) -> None:
        """Starts the runs and returns once the client has all of their output.

        Raises:
            SapwoodError: One of them failed; the caller closes the others.
        """
        self._left = len(runs)
        if len(runs) == 1:
            await runs[0].start(self, 0)
        else:
            # A few at a time: all together would block the event loop until each of them waits.
            for first in range(0, len(runs), A_FEW):
                if self._error is None:
                    part = enumerate(runs[first : first + A_FEW], first)
                    await asyncio.gather(*(run.start(self, index) for index, run in part))
        client = self._client
        while True:
            if self._behind or not client.writable():
                if self._stint is not None and self._stint.over:
                    await self._stint.turn()
                await client.drained()
                while self._behind and client.writable():
                    index = next(iter(self._behind))
                    del self._behind[index]
                    runs[index].flush()
            elif self._error is not None:
                try:
                    raise self._error
                finally:
                    self._error = (
                        None  # its traceback refers to this frame: a cycle that only the garbage collector would free
                    )
            elif not self._left:
                return
            else:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
                self._waiter = None

    def ready(self, index: int) -> bool:
        if self._client.writable():
            return True
        self._behind[index] = None
        self._wake()
        return False

    def delta(self, index: int, delta: Delta) -> None:
        if delta.finish is not None:
            self._left -= 1
        if not self._client.write(index, delta) or not self._left:
            self._wake()

    def token_writer(self, index: int) -> Relay | None:
        """The client's own function for single token ids."""
        return self._client.token_writer(index)

    def failed(self, error: SapwoodError) -> None:
        """Keeps the first error of all runs; :meth:`carry` raises it."""
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
