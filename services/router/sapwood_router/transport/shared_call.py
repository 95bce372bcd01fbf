"""One bidirectional call that many requests share.

A message costs much more CPU than what is in it: what is to be sent goes out in one once all that is ready was handled, and what
there is while the connection is busy goes out in the next.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod

from sapwood_common.http2.client.duplex_call import CallEndedError, DuplexCall
from sapwood_common.network.channel import Dialer
from sapwood_router.transport.duplex_dial import open_call

RETRY_INTERVAL = 0.1
_OPEN_TIMEOUT = 2.0


class SharedCall(ABC):
    """Sends what gathers, over ``call`` if that is open already."""

    def __init__(self, call: DuplexCall | None = None) -> None:
        self._call = call
        self._flushing = False

    @abstractmethod
    def _next_message(self) -> bytes | None:
        """What there is to be sent, or as much of it as a message may hold; None if there is nothing."""

    @abstractmethod
    def _take(self, message: bytes) -> None:
        """A message has come. Must not raise."""

    def abandon(self, problem: str) -> None:
        """Gives the call up, if there is one."""
        if self._call is not None:
            self._call.close(problem)

    async def _carry(self, call: DuplexCall) -> CallEndedError:
        """Sends and takes messages until the call ends; returns how."""
        self._call = call
        try:
            call.follow(self._take, self._flush)
            self._flush()
            return await call.wait_ended()
        finally:
            call.close()
            self._call = None

    def _schedule(self, delay: float = 0.0) -> None:
        """Sends what there is once everything that is ready now was handled, or after ``delay`` seconds."""
        if not self._flushing:
            self._flushing = True
            loop = asyncio.get_running_loop()
            if delay:
                loop.call_later(delay, self._flush)
            else:
                loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        call = self._call
        while call is not None and call.ready and (message := self._next_message()) is not None:
            call.write(message)


class LastingCall(SharedCall):
    """One that is opened again whenever it is lost, while :meth:`run` runs.

    Args:
        address: Where it goes.
        method: The method's path.
        dialer: Connects.
    """

    def __init__(self, address: str, method: str, dialer: Dialer) -> None:
        super().__init__()
        self._address = address
        self._method = method
        self._dialer = dialer
        self._stands = False
        """Whether the peer was heard on it."""
        self._finishing = False

    @property
    @abstractmethod
    def load(self) -> int:
        """Requests under way."""

    @abstractmethod
    def _lost(self, end: CallEndedError) -> float:
        """The call was lost, or could not be opened; returns the seconds until the next try."""

    def finish(self) -> None:
        """No request will come any more: :meth:`run` returns once none is under way."""
        self._finishing = True
        self._end_if_finished()

    async def run(self) -> None:
        """Keeps the call open until :meth:`finish`; cancel it to stop."""
        while not (self._finishing and not self.load):
            try:
                call = self._call = await open_call(self._address, self._method, self._dialer, _OPEN_TIMEOUT)
                self._end_if_finished()
                end = await self._carry(call)
            except CallEndedError as error:
                end = error
            finally:
                self._stands = False
            await asyncio.sleep(self._lost(end))

    def _end_if_finished(self) -> None:
        if self._finishing and not self.load:
            self.abandon("its replica left")
