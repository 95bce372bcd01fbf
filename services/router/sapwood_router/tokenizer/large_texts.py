"""Long texts are encoded one request at a time: while that lasts, each is in memory several times, and its tokens, too.

Callers take turns, and none takes the places of another: where all are taken, who has the most of them loses one.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sapwood_common.errors import DeadlineExceededError, ResourceExhaustedError

LARGE = 1024 * 1024
"""Characters of a request's texts from which on it is one of these."""
_MOST_WAITING = 2

_Waiters = deque[asyncio.Future[None]]


class LargeTexts:
    """The caller whose turn it is."""

    def __init__(self) -> None:
        self._taken = False
        self._waiting: OrderedDict[str, _Waiters] = OrderedDict()
        """By caller, the one first whose turn is next; none of them is empty."""

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn."""
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def turn(self, caller: str, deadline: float) -> AsyncIterator[None]:
        """Waits for its turn, and has it as long as this is entered.

        Args:
            caller: Whose it is.
            deadline: On the event loop's clock.

        Raises:
            ResourceExhaustedError: Too many wait already.
            DeadlineExceededError: It does not come in time.
        """
        if self._taken:
            await self._wait(caller, deadline)
        self._taken = True
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, caller: str, deadline: float) -> None:
        if self.waiting >= _MOST_WAITING:
            self._make_room(caller)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        try:
            async with asyncio.timeout_at(deadline):
                await turn
        except BaseException as error:
            if not turn.cancelled() and turn.done() and turn.exception() is None:  # its turn came as it left
                self._pass_on()
            else:
                self._forget(caller, turn)
            if isinstance(error, TimeoutError):
                raise DeadlineExceededError("the deadline passed before it was this request's turn") from None
            raise

    def _make_room(self, caller: str) -> None:
        """Refuses the last request of who has the most waiting, or this one if that is its own caller."""
        most = max(self._waiting, key=lambda each: len(self._waiting[each]))
        error = ResourceExhaustedError("other large requests wait", retry_after=1.0)
        if len(self._waiting[most]) <= len(self._waiting.get(caller, ())) + 1:
            raise error
        last = self._waiting[most][-1]
        self._forget(most, last)
        if not last.done():
            last.set_exception(error)

    def _forget(self, caller: str, turn: asyncio.Future[None]) -> None:
        waiters = self._waiting.get(caller)
        if waiters is not None and turn in waiters:
            waiters.remove(turn)
            if not waiters:
                del self._waiting[caller]

    def _pass_on(self) -> None:
        while self._waiting:
            caller, waiters = self._waiting.popitem(last=False)
            turn = waiters.popleft()
            if waiters:
                self._waiting[caller] = waiters
            if not turn.done():
                turn.set_result(None)
                return
        self._taken = False
