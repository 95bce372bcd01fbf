"""Accepts connections as fast as they come, and begins a few of them in each turn of the event loop.

uvloop accepts one connection a turn: where a client opens thousands a second, the kernel's queue overflows, and others wait a
second until TCP tries again. asyncio begins all waiting connections in one turn, which holds up the calls that run.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import time
from collections.abc import Callable

from sapwood_net.pacing.tarpit import Tarpit
from sapwood_net.pacing.time_share import SLICE, TimeShare
from sapwood_net.sockets.encryption import Encryption
from sapwood_net.sockets.newcomers import Newcomers, source
from sapwood_net.sockets.tls_connection import INPUT_BYTES, TlsConnection

logger = logging.getLogger(__name__)

_BEGUN, _ENCRYPTED_BEGUN = 8, 1
"""Connections that begin in a turn; over TLS the handshake costs a millisecond or two."""
_PROMPT = 0.05
"""Seconds within which an ordinary client begins its handshake, however far away it is: it sends the last packet that opens the
connection and the first of the handshake together. One that opens very many connections takes longer."""
_PROMPT_REST, _LATE_REST = 1.0, 3.0
"""Handshakes of prompt clients have half of the time, those of the others a quarter."""
_MOST_QUEUED, _BREAK = 2, 0.001
"""While this many handshakes wait for CPU time, the next one begins at least this many seconds later."""
_MOST_WAITING = 1024
"""Connections that were accepted and have not begun; over TLS as many again that were late."""
_MOST_SILENT, _MOST_SHAKING = 4096, 1024
"""Connections over TLS whose clients have sent nothing yet, and those in handshakes; beyond either the oldest is closed."""
_CLOSED_AT_ONCE = 64
_PAUSE = 0.5
"""Seconds until the next try where the process has no more file descriptors."""
_NO_ROOM = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
_HANDSHAKE = b"\x16"
"""The first byte of a TLS connection: the type of a handshake's record."""
_MOST_PLAIN = 64 * 1024
_TEXT = b"this port speaks TLS: ask it by https\n"
_SPEAKS_TLS = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
    % len(_TEXT)
) + _TEXT
_ESTABLISHED = 1
"""State of a TCP connection whose client has not left."""


class _Lane:
    """Connections that begin in their order, and over TLS have a part of the time for their handshakes."""

    def __init__(self, rest: float) -> None:
        self.waiting = Newcomers(_MOST_WAITING)
        self.handshakes = TimeShare(rest=rest)

    @property
    def ready(self) -> bool:
        """Whether the next one may begin now."""
        return len(self.waiting) > 0 and self.handshakes.waiting < _MOST_QUEUED


class Acceptor:
    """Accepts the connections of one listening socket, and closes the socket in the end.

    Args:
        listener: The socket, for an event loop.
        make: Makes the protocol of a connection.
        encryption: None for plain text.
    """

    def __init__(
        self, listener: socket.socket, make: Callable[[], asyncio.BaseProtocol], encryption: Encryption | None = None
    ) -> None:
        self._listener = listener
        self._make = make
        self._encryption = encryption
        self._loop = asyncio.get_running_loop()
        self._share = TimeShare()
        """Shares the time that decrypting takes."""
        self._prompt, self._late = _Lane(_PROMPT_REST), _Lane(_LATE_REST)
        """The lanes of clients that began to speak at once, and of the others; without TLS nobody waits to hear them."""
        self._memory = memoryview(bytearray(INPUT_BYTES))
        self._tarpit = Tarpit() if encryption is None else Tarpit(encryption.held)
        self._silent: dict[socket.socket, tuple[float, str | bytes]] = {}
        """Connections whose clients have sent nothing, each with the loop's time until which they may, and where it comes from;
        the oldest first."""
        self._sweeper: asyncio.TimerHandle | None = None
        self._beginning: dict[asyncio.Task[None], None] = {}
        self._due = False
        self._resume: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def waiting(self) -> int:
        """Connections that were accepted and have not begun."""
        return len(self._prompt.waiting) + len(self._late.waiting)

    @property
    def silent(self) -> int:
        """Connections over TLS whose clients have sent nothing yet."""
        return len(self._silent)

    @property
    def handshakes(self) -> int:
        """Connections in their handshakes."""
        return len(self._beginning)

    def start(self) -> None:
        """Begins to accept."""
        self._resume = None
        self._loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Accepts no more; what has not begun is closed."""
        if self._closed:
            return
        self._closed = True
        if self._resume is not None:
            self._resume.cancel()
        else:
            self._loop.remove_reader(self._listener)
        self._listener.close()
        for connection in tuple(self._silent):
            self._close_silent(connection)
        if self._sweeper is not None:
            self._sweeper.cancel()
        for lane in (self._prompt, self._late):
            while lane.waiting:
                lane.waiting.pop().close()
        for task in self._beginning:
            task.cancel()
        self._tarpit.close()

    def _accept(self) -> None:
        until = time.perf_counter() + SLICE
        while time.perf_counter() < until:
            try:
                connection, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                logger.warning("no connection can be accepted: %s", error.strerror)
                self._pause()
                break
            if _is_alive(connection):
                connection.setblocking(False)
                self._admit(connection, source(address))
            else:
                connection.close()
        if not self._due:
            self._begin_some()

    def _admit(self, connection: socket.socket, address: str | bytes) -> None:
        encryption = self._encryption
        if encryption is None:
            self._line_up(self._prompt, connection, address)
            return
        if len(self._silent) >= _MOST_SILENT:
            self._close_silent(next(iter(self._silent)))
        self._silent[connection] = self._loop.time() + encryption.handshake, address
        self._loop.add_reader(connection, self._hear, connection, self._loop.time() + _PROMPT)
        if self._sweeper is None:
            self._sweep()

    def _hear(self, connection: socket.socket, prompt_until: float) -> None:
        _, address = self._silent.pop(connection)
        self._loop.remove_reader(connection)
        if not _begins_tls(connection):
            connection.close()
            return
        self._line_up(self._prompt if self._loop.time() <= prompt_until else self._late, connection, address)
        if not self._due:
            self._begin_some()

    @staticmethod
    def _line_up(lane: _Lane, connection: socket.socket, address: str | bytes) -> None:
        too_many = lane.waiting.add(connection, address)
        if too_many is not None:
            too_many.close()

    def _close_silent(self, connection: socket.socket) -> None:
        del self._silent[connection]
        self._loop.remove_reader(connection)
        connection.close()

    def _sweep(self) -> None:
        """Closes some of those that have had their time; called again when the next one has."""
        self._sweeper = None
        for _ in range(_CLOSED_AT_ONCE):
            if not self._silent:
                return
            connection, (until, _) = next(iter(self._silent.items()))
            if until > self._loop.time():
                break
            self._close_silent(connection)
        self._sweeper = self._loop.call_at(until, self._sweep)

    def _pause(self) -> None:
        self._loop.remove_reader(self._listener)
        self._resume = self._loop.call_later(_PAUSE, self.start)

    def _begin_some(self) -> None:
        begun = 0
        for lane in (self._prompt, self._late):
            left = _BEGUN if self._encryption is None else _ENCRYPTED_BEGUN
            while left and lane.ready:
                connection = lane.waiting.pop()
                if _is_alive(connection):
                    self._begin_one(connection, lane.handshakes)
                    left -= 1
                    begun += 1
                else:
                    connection.close()
        self._due = begun > 0 or self.waiting > 0  # what is accepted in this same turn waits for the next
        if begun:
            self._loop.call_soon(self._begin_some)
        elif self._due:
            self._loop.call_later(_BREAK, self._begin_some)

    def _begin_one(self, connection: socket.socket, handshakes: TimeShare) -> None:
        if len(self._beginning) >= _MOST_SHAKING:
            oldest = next(iter(self._beginning))
            del self._beginning[oldest]
            oldest.cancel()
        task = self._loop.create_task(self._begin(connection, handshakes))
        self._beginning[task] = None
        task.add_done_callback(lambda over: self._beginning.pop(over, None))

    async def _begin(self, connection: socket.socket, handshakes: TimeShare) -> None:
        try:
            if self._encryption is None:
                await self._loop.connect_accepted_socket(self._make, connection)
            else:
                await self._begin_tls(connection, self._encryption, handshakes)
        except OSError as error:  # the client has left, or speaks no TLS that is spoken here
            logger.debug("a connection did not begin: %s", error)

    async def _begin_tls(self, connection: socket.socket, encryption: Encryption, handshakes: TimeShare) -> None:
        tls = TlsConnection(self._make(), encryption, self._share, handshakes, self._memory, self._tarpit)
        try:
            await self._loop.connect_accepted_socket(lambda: tls, connection)
            if not await tls.shaken:
                logger.debug("a TLS handshake failed")
        except BaseException:
            tls.abort()
            raise


def _is_alive(connection: socket.socket) -> bool:
    """Whether the client is still there: a connection that its client has given up gets no protocol."""
    try:
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED
    except (AttributeError, OSError):  # no Linux, or no TCP
        return True


def _begins_tls(connection: socket.socket) -> bool:
    """Whether the first byte is a handshake's. A client that speaks HTTP/1.1 gets an answer; what came is read, or the answer
    would be lost."""
    with contextlib.suppress(OSError):
        if connection.recv(1, socket.MSG_PEEK) == _HANDSHAKE:
            return True
        came = connection.recv(_MOST_PLAIN)
        if b" HTTP/1." in came:
            connection.send(_SPEAKS_TLS)
    return False
