"""Writes over TLS: encrypts data a little at a time, no faster than the client reads.

To encrypt an answer of 10 MB takes 20 ms in one piece, and as much memory again, also where its client reads nothing.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from sapwood_net.pacing.time_share import TimeShare

_AT_ONCE = 64 * 1024
"""Bytes that are encrypted as they are written, if nothing waits before them."""
_PIECE = 32 * 1024
"""Bytes that are encrypted before the clock is looked at."""


class TlsEnd(Protocol):
    """The end of a connection that a writer writes for."""

    def encrypt(self, data: memoryview) -> None:
        """Encrypts data and sends it; may fail the connection, which then drops the writer."""
        ...

    def all_encrypted(self) -> None:
        """Nothing waits any more."""
        ...


class TlsWriter:
    """Implements ``time_share.Worker``.

    Args:
        end: The connection.
        share: Shares the event loop's time among all such writers of a listener.

    Attributes:
        size: Bytes that wait to be encrypted.
    """

    def __init__(self, end: TlsEnd, share: TimeShare) -> None:
        self._end: TlsEnd | None = end
        self._share = share
        self._waiting: deque[memoryview] = deque()
        self._paused = False
        self.size = 0

    def write(self, data: memoryview) -> None:
        """Encrypts data now, or as its client reads what was written before."""
        if self._end is None:
            return
        if not self._waiting and len(data) <= _AT_ONCE:
            self._end.encrypt(data)
            return
        self._waiting.append(data)
        self.size += len(data)
        self._queue()

    def pause(self) -> None:
        """The client does not read."""
        self._paused = True
        self._share.drop(self)

    def resume(self) -> None:
        """The client has read on."""
        self._paused = False
        self._queue()

    def drop(self) -> None:
        """Encrypts nothing more: the connection is lost."""
        self._end = None  # they refer to each other: neither is to wait for the collector
        self._waiting.clear()
        self.size = 0
        self._share.drop(self)

    def go_on(self, until: float) -> bool:
        while self._waiting and not self._paused:
            data = self._waiting.popleft()
            if len(data) > _PIECE:
                self._waiting.appendleft(data[_PIECE:])
            self.size -= min(len(data), _PIECE)
            self._encrypt(data[:_PIECE])
            if self._share.clock() >= until:
                break
        if self._end is not None and not self._waiting:
            self._end.all_encrypted()
        return bool(self._waiting) and not self._paused

    def _encrypt(self, data: memoryview) -> None:
        if self._end is not None:
            self._end.encrypt(data)

    def _queue(self) -> None:
        if self._waiting and not self._paused:
            self._share.add(self)
