"""One connection's share of the memory of all connections."""

from __future__ import annotations

import asyncio

from sapwood_net.pacing.body_memory import BodyMemory, HeldBody
from sapwood_net.pacing.timer import Timer

LIGHT = 4 * 1024
"""Up to this many waiting bytes of a connection are not counted."""
_ENCRYPTED = 24 * 1024
"""The memory of a TLS connection itself, which counts together with its bytes."""
_SLOW_SECONDS = 1.0
"""Seconds after which an answer that waits for its client counts as memory; again and again, as long as it waits."""


class HeldBytes:
    """Counts the bytes that a client has sent ahead, if they are many, and those that it is slow to read.

    Args:
        bodies: The memory of all connections. If all hold too much, the connection that holds the most is made to fail.

    Attributes:
        encrypted: Whether the connection is over TLS.
        counted: The bytes that are counted now: sent ahead, and left unread. While there are none, :meth:`weigh` need not be told
            of up to :data:`LIGHT` that wait.
    """

    def __init__(self, bodies: BodyMemory) -> None:
        self.encrypted = False
        self._bodies = bodies
        self._waiting = 0
        """Bytes that were sent ahead."""
        self._unread = 0
        """Bytes of an answer that the client has been slow to read, as far as they count."""
        self.counted = 0
        self._slow = Timer()

    def weigh(self, connection: HeldBody, waiting: int) -> None:
        """Counts again, with this many bytes sent ahead; the connection may have failed afterwards."""
        self._waiting = waiting
        held = self._unread
        if waiting > LIGHT:
            held += waiting + _ENCRYPTED * self.encrypted
        before, self.counted = self.counted, held
        if held > before:
            self._bodies.grow(connection, held - before)
        elif held < before:
            self._bodies.shrink(connection, before - held)

    def begin_unread(self, connection: HeldBody, transport: asyncio.Transport) -> None:
        """The client does not read: what it leaves unread counts after a while, until :meth:`end_unread`."""
        self._slow.start(_SLOW_SECONDS, self._notice_slow, connection, transport)

    def end_unread(self, connection: HeldBody) -> None:
        """The client has read on."""
        self._unread = 0
        self._slow.stop()
        if self.counted:
            self.weigh(connection, self._waiting)

    def drop(self) -> None:
        """The connection holds nothing that counts any more; anybody who calls this has seen to the memory of all."""
        self.counted = 0
        self._waiting = 0
        self._unread = 0
        self._slow.stop()

    def _notice_slow(self, connection: HeldBody, transport: asyncio.Transport) -> None:
        """The client has not read an answer for a while. A whole one may be larger than all memory: it counts in part."""
        self.begin_unread(connection, transport)
        self._unread = min(transport.get_write_buffer_size(), self._bodies.most // 4)
        self.weigh(connection, self._waiting)
