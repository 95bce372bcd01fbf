"""What a reader and a source of pages say to each other, whichever way the pages themselves go.

A connection carries one read. The reader sends an :class:`Ask` and what the source answers depends on its ``way``: see
``movers``, each module of which has both sides. Nothing else is understood: a connection that says anything else, or nothing for
``SILENCE_SECONDS``, is closed.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

from sapwood_worker.core.cache.handoff.mover import MoverError
from sapwood_worker.core.cache.handoff.tls import PageTls
from sapwood_worker.records.handoff import HandoffTicket

Way = Literal["tcp", "shm", "nixl", "mooncake", "cuda", "device"]

YES, NO, LATER, WAIT = b"\1", b"\0", b"\2", b"\3"
SILENCE_SECONDS = 1.0
READ_SECONDS = 4.0
"""The most that a whole read takes; whoever asked waits little longer (``pulls.PATIENCE_SECONDS``)."""

_ASK = struct.Struct("<8s16sQI")
_INDEX = struct.Struct("<I")
_MAGIC: dict[Way, bytes] = {
    "tcp": b"SAPWHO02",
    "shm": b"SAPWHM02",
    "nixl": b"SAPWHX02",
    "mooncake": b"SAPWHK02",
    "cuda": b"SAPWHC02",
    "device": b"SAPWHD02",
}
_MOST_PAGES = 4096
_AHEAD_BYTES = 1 << 16


class Ask(NamedTuple):
    """What a reader wants.

    Attributes:
        way: How.
        transfer_id: The ticket's.
        epoch: The epoch of the process that gave it.
        indices: Which of the prompt's pages.
    """

    way: Way
    transfer_id: bytes
    epoch: int
    indices: list[int]


class Wire:
    """One end of a connection. Every call raises OSError where it broke, or nothing came for too long.

    Args:
        connection: Made by :func:`dialled`, or accepted.
        seconds: For all that is said on it.
    """

    def __init__(self, connection: socket.socket, seconds: float = READ_SECONDS) -> None:
        self._connection = connection
        self._seconds = seconds
        self._unsent = bytearray()
        self._ahead = bytearray()
        self._said = time.monotonic()
        self.goes_on()

    def goes_on(self) -> None:
        """The other side may take as long again, or this one does."""
        self._until = time.monotonic() + self._seconds

    def send(self, content: bytes | memoryview) -> None:
        """Says something."""
        self.flush()
        self._connection.sendall(content)

    def put(self, content: bytes) -> None:
        """Says something with what follows, or when something is to be heard: so many short answers go as one."""
        self._unsent += content

    def flush(self) -> None:
        """Says what was put."""
        if self._unsent:
            self._connection.sendall(self._unsent)
            self._unsent.clear()

    def ask(self, ask: Ask) -> None:
        """Says what is wanted."""
        head = _ASK.pack(_MAGIC[ask.way], ask.transfer_id, ask.epoch, len(ask.indices))
        self.send(head + b"".join(map(_INDEX.pack, ask.indices)))

    def asked(self) -> Ask | None:
        """What the other side wants; None: nothing that is understood."""
        magic, transfer_id, epoch, count = _ASK.unpack(self.receive(_ASK.size))
        way = next((way for way, known in _MAGIC.items() if magic == known), None)
        if way is None or not 0 < count <= _MOST_PAGES:
            return None
        indices = [index for (index,) in _INDEX.iter_unpack(self.receive(count * _INDEX.size))]
        return Ask(way, transfer_id, epoch, indices)

    def receive(self, count: int) -> bytes:
        """So many bytes. Raises as :meth:`fill`."""
        while len(self._ahead) < count:
            self._await()
            content = self._connection.recv(_AHEAD_BYTES)
            if not content:
                raise MoverError("the other side ended the connection")
            self._ahead += content
        found = bytes(self._ahead[:count])
        del self._ahead[:count]
        return found

    def says_yes(self) -> bool:
        """A byte that is a yes. Raises as :meth:`fill`."""
        return self.receive(1) == YES

    def says_wait(self) -> None:
        """Says, now and then, that an answer is on its way. Cheap to call often."""
        if time.monotonic() > self._said + SILENCE_SECONDS / 4:
            self._said = time.monotonic()
            self.goes_on()
            self.send(WAIT)

    def answer(self) -> bytes:
        """A byte that is not ``WAIT``. Raises as :meth:`fill`."""
        while (said := self.receive(1)) == WAIT:
            self.goes_on()
        return said

    def fill(self, buffer: memoryview) -> None:
        """Fills a buffer.

        Raises:
            MoverError: The other side ended the connection before, or its time is over.
        """
        known = min(len(self._ahead), len(buffer))
        buffer[:known] = self._ahead[:known]
        del self._ahead[:known]
        buffer = buffer[known:]
        while buffer:
            self._await()
            count = self._connection.recv_into(buffer)
            if not count:
                raise MoverError("the other side ended the connection")
            buffer = buffer[count:]

    def _await(self) -> None:
        """Says what was not said yet: an answer is wanted.

        Raises:
            MoverError: The other side's time is over.
        """
        self.flush()
        if time.monotonic() > self._until:
            raise MoverError("it takes too long")


@contextmanager
def dialled(ticket: HandoffTicket, way: Way, indices: Sequence[int], tls: PageTls | None) -> Iterator[Wire]:
    """A connection to a ticket's source, which has been asked for pages.

    Raises:
        MoverError: There is none; also for whatever breaks while it is used.
    """
    host, _, port = ticket.source.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), SILENCE_SECONDS) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            secured = connection if tls is None else tls.client().wrap_socket(connection)
            with secured:
                wire = Wire(secured)
                wire.ask(Ask(way, ticket.transfer_id, ticket.epoch, list(indices)))
                yield wire
    except (OSError, ValueError) as error:
        raise MoverError(f"{ticket.source}: {error}") from error
