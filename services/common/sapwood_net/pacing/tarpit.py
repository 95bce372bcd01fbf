"""Holds connections whose clients broke a rule: nothing more is read from them, and they close a while later.

Who floods, is closed and comes again at once makes a server begin connections, shake hands and read first bursts without end. A
client that waits for its connection to end before it comes again waits here: that costs the client time and the server next to
nothing. One that behaves has read the last words, and leaves by itself.
"""

from __future__ import annotations

import asyncio

HELD_SECONDS = 5.0
_MOST_HELD = 1024
"""Connections; beyond it the one that was held the longest closes. Each is a socket and a few KB, over TLS 27."""
_CLOSED_AT_ONCE = 64
"""Connections that close in one turn of the event loop."""


class Tarpit:
    """Holds the connections of one server.

    Args:
        seconds: How long it holds each; 0 closes them at once.
        most: How many it holds.
    """

    def __init__(self, seconds: float = HELD_SECONDS, most: int = _MOST_HELD) -> None:
        self._seconds = seconds
        self._most = most
        self._held: dict[_Held, float] = {}
        """Each with the loop's time at which it closes; the oldest first."""
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def held(self) -> int:
        """Connections that are held now."""
        return len(self._held)

    def hold(self, transport: asyncio.Transport) -> None:
        """Takes a connection over: its protocol hears no more of it. What was written is still sent."""
        held = _Held(self, transport)
        transport.set_protocol(held)
        if transport.is_closing():
            return
        if self._closed or not self._seconds:
            transport.close()
            return
        transport.pause_reading()
        if len(self._held) >= self._most:
            next(iter(self._held)).end()
        loop = asyncio.get_running_loop()
        self._held[held] = due = loop.time() + self._seconds
        if self._timer is None:
            self._timer = loop.call_at(due, self._sweep)

    def release(self, held: _Held) -> None:
        """Forgets a connection that is over."""
        self._held.pop(held, None)

    def close(self) -> None:
        """Closes all that are held, and holds no more."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for held in tuple(self._held):
            held.end()

    def _sweep(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        for _ in range(_CLOSED_AT_ONCE):
            if not self._held:
                return
            held, due = next(iter(self._held.items()))
            if due > loop.time():
                break
            held.end()
        self._timer = loop.call_at(due, self._sweep)


class _Held(asyncio.Protocol):
    """The protocol of a connection that is held."""

    def __init__(self, tarpit: Tarpit, transport: asyncio.Transport) -> None:
        self._tarpit = tarpit
        self._transport: asyncio.Transport | None = transport

    def end(self) -> None:
        """Closes it, whatever the client has not read."""
        self._tarpit.release(self)
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._tarpit.release(self)
        self._transport = None  # over TLS it refers to this object: neither is to wait for the collector
