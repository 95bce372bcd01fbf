"""TLS on the event loop, a little at a time.

What a client sends over TLS costs time before any protocol sees it: a change of keys has 27 bytes and takes 20 us, and each
byte of content may come in a record of its own. asyncio and uvloop decrypt all that they have read, uvloop up to 8 MB between
two polls, which can take seconds. Here a connection has its share of the loop's time (:class:`TimeShare`), keeps the rest, and
reads no more until it is done. A client whose records hold next to nothing is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Callable
from typing import Any, cast

from sapwood_net.pacing.tarpit import Tarpit
from sapwood_net.pacing.time_share import TimeShare
from sapwood_net.pacing.timer import Timer
from sapwood_net.sockets.encryption import Encryption
from sapwood_net.sockets.tls_writer import TlsWriter

logger = logging.getLogger(__name__)

INPUT_BYTES = 16 * 1024
"""Bytes that are read of a connection in one turn of the event loop."""
_PIECE = 1024
"""Bytes of whole records that are decrypted before the clock is looked at: at most 38 changes of keys, or one large record."""
_LIGHT = 2 * 1024
"""Bytes of a request or two with their handshake: who has sent no more continues before those with much."""
_FED = 4 * 1024
"""Bytes that OpenSSL is handed at once: of each connection it keeps as much memory as that was at most."""
_MOST_CONTENT = 16 * 1024
"""Bytes of content in one record."""
_MOST_ANSWERS = 64 * 1024
"""Bytes that TLS itself may answer to a client that reads nothing."""
_MOST_DROPPED = 256 * 1024
"""Bytes that are read and dropped of a connection that closes."""


class TlsConnection(asyncio.BufferedProtocol, asyncio.Transport):
    """The server's end of a connection over TLS: the protocol of its socket, and the transport of what comes out. Implements
    ``time_share.Worker`` and ``TlsEnd``.

    Args:
        protocol: What gets the content. It hears nothing before the handshake is over, and of one that fails nothing at all.
        encryption: The listener's.
        share: Shares the event loop's time among the listener's connections.
        handshakes: The same until the handshake is over.
        memory: All that is read goes there first.
        tarpit: Where it ends if the client breaks a rule.

    Attributes:
        shaken: Done when the handshake is over: whether it succeeded.
    """

    def __init__(
        self,
        protocol: asyncio.BaseProtocol,
        encryption: Encryption,
        share: TimeShare,
        handshakes: TimeShare,
        memory: memoryview,
        tarpit: Tarpit,
    ) -> None:
        super().__init__()
        self.shaken: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._protocol = protocol
        self._encryption = encryption
        self._share = handshakes
        """Gives this connection its time on the event loop: first with other handshakes, later with all connections."""
        self._share_later = share
        self._memory = memory
        self._tarpit = tarpit
        self._socket: asyncio.Transport | None = None
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = encryption.context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._writer = TlsWriter(self, share)
        self._data = b""
        """Bytes received; those before ``_at`` are decrypted."""
        self._at = 0
        self._records = TlsRecords()
        self._light = True
        """Whether all that the client had sent, when it was read last, was little."""
        self._begun = False
        """Whether the protocol knows of the connection."""
        self._reading = True
        """Whether the socket is read."""
        self._paused = False
        """Whether the protocol wants no more for now."""
        self._breathes = False
        """Whether all memory was filled, and reading continues in a later turn."""
        self._closing = False
        self._gone = False
        """Whether the client sends no more, and the socket closes once all is written."""
        self._unread = False
        """Whether the client does not read what was sent."""
        self._held_back = False
        """Whether the protocol was asked to write no more."""
        self._answered = 0
        """Bytes that TLS itself has answered while the client does not read."""
        self._dropped = 0
        self._timer = Timer()
        """Ends the handshake, or the wait for the client to leave."""

    # What the socket tells (BufferedProtocol).

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._socket = transport = cast(asyncio.Transport, transport)
        self._timer.start(self._encryption.handshake, self.abort)
        if self._closing:  # it was given up before it began
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = True
        self._timer.stop()
        self._share.drop(self)
        self._writer.drop()
        self._data, self._at = b"", 0
        if not self.shaken.done():
            self.shaken.set_result(False)
        if self._begun:
            self._begun = False
            self._protocol.connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._memory

    def buffer_updated(self, nbytes: int) -> None:
        if nbytes == len(self._memory):  # or the event loop would continue reading this one
            self._breathes = True
            self._share.add(self)
        if self._closing:
            self._dropped += nbytes
            if self._dropped > _MOST_DROPPED:
                self.abort()
        else:
            waited = self._at < len(self._data)
            self._light = not waited and nbytes <= _LIGHT
            self._data = self._data[self._at :] + self._memory[:nbytes]
            self._at = 0
            if not waited:
                share = self._share  # which is another one after the handshake
                self._work(share.is_over)
                if share.measuring:
                    share.end()
        self._regulate()

    def eof_received(self) -> bool:
        """Has the connection close, whether or not the client said so in TLS."""
        if self._begun and not self._closing:
            cast(asyncio.Protocol, self._protocol).eof_received()
        self._expect_end()
        self._gone = self._writer.size > 0
        return self._gone

    def pause_writing(self) -> None:
        self._unread = True
        self._writer.pause()
        self._hold_back()

    def resume_writing(self) -> None:
        self._unread = False
        self._answered = 0
        self._writer.resume()
        self._hold_back()

    def _hold_back(self) -> None:
        """Tells the protocol whether to write more."""
        held_back = self._unread or self._writer.size > 0
        if self._begun and held_back != self._held_back:
            self._held_back = held_back
            (self._protocol.pause_writing if held_back else self._protocol.resume_writing)()

    # What the protocol asks for (Transport).

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        match name:
            case "sslcontext":
                return self._encryption.context
            case "ssl_object":
                return self._tls
            case "light":
                return self._light
        return default if self._socket is None else self._socket.get_extra_info(name, default)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def is_closing(self) -> bool:
        return self._closing or self._socket is None or self._socket.is_closing()

    def is_reading(self) -> bool:
        return not self._paused

    def pause_reading(self) -> None:
        self._paused = True
        self._regulate()

    def resume_reading(self) -> None:
        self._paused = False
        if self._at < len(self._data):
            self._queue()
        self._regulate()

    def get_write_buffer_size(self) -> int:
        return 0 if self._socket is None else self._socket.get_write_buffer_size() + self._writer.size

    def can_write_eof(self) -> bool:
        return False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self.is_closing():
            self._writer.write(memoryview(data if isinstance(data, bytes) else bytes(data)))
            self._hold_back()

    def close(self) -> None:
        """Closes after what was written, once the client has closed too or has had its time: with bytes of it unread, the kernel
        would take our last ones back."""
        if self.is_closing():
            return
        self._closing = True
        self._data, self._at = b"", 0
        self._expect_end()
        if not self._writer.size:
            self._say_goodbye()
        self._regulate()

    def abort(self) -> None:
        self._closing = True
        if self._socket is not None:
            self._socket.abort()

    # What the writer asks for (TlsEnd).

    def encrypt(self, data: memoryview) -> None:
        try:
            while data:
                data = data[self._tls.write(data) :]
        except ssl.SSLError as error:
            self._fail(error)
        else:
            self._send()

    def all_encrypted(self) -> None:
        tell = self._say_goodbye if self._closing else self._hold_back
        tell()
        if self._gone and self._socket is not None:
            self._socket.close()

    def _say_goodbye(self) -> None:
        with contextlib.suppress(ssl.SSLError):  # above all that the client has not said goodbye, too
            self._tls.unwrap()
        self._send()
        assert self._socket is not None
        if not self._socket.is_closing() and self._socket.can_write_eof():
            with contextlib.suppress(OSError):  # the client has left
                self._socket.write_eof()

    def go_on(self, until: float) -> bool:
        self._breathes = False
        share = self._share
        self._work(lambda: share.clock() >= until)
        self._regulate()
        left = self._at < len(self._data) and not self._paused
        if left and share is not self._share:
            self._queue()
            return False
        return left

    def _work(self, is_over: Callable[[], bool]) -> None:
        """Decrypts as long as there is time, and queues the rest for later."""
        try:
            while not is_over():
                if not self._advance():
                    return
        except Exception:
            logger.exception("a connection is given up")
            self.abort()
        else:
            self._queue()

    def _queue(self) -> None:
        self._share.add(self, light=self._light)

    def _advance(self) -> bool:
        """Decrypts a piece; says whether there is another to decrypt now."""
        if self._paused or self._closing or self._at == len(self._data):
            return False
        piece = self._data[self._at : self._records.end_of_piece(self._data, self._at, _PIECE)]
        self._at += len(piece)
        try:
            if not self._begun:
                self._incoming.write(piece)
                self._shake_hands()
            else:
                self._read(piece)
        except ssl.SSLError as error:
            self._fail(error)
        return not self._closing and self._at < len(self._data)

    def _shake_hands(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._send()
            return
        self._send()
        self._timer.stop()
        if self.shaken.done():  # nobody waits for it any more
            self.abort()
            return
        self._begun = True
        self._share = self._share_later
        self.shaken.set_result(True)
        self._protocol.connection_made(self)
        if not self._closing:
            self._read(b"")

    def _read(self, piece: bytes) -> None:
        """Hands over what more has completed."""
        parts, over = [], False
        for at in range(0, len(piece) or 1, _FED):
            self._incoming.write(piece[at : at + _FED])
            try:
                while part := self._tls.read(_MOST_CONTENT):
                    parts.append(part)
                over = True
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLZeroReturnError:
                over = True
            break
        self._answer()
        content = b"".join(parts)
        if not self._records.have_content(len(piece), len(content)):
            logger.info("%s sends records with next to nothing in them", self.get_extra_info("peername"))
            self._hold()
            return
        if content:
            hand_over(self._protocol, content)
        if over and not self._closing:
            cast(asyncio.Protocol, self._protocol).eof_received()
            self.close()

    def _answer(self) -> None:
        """Sends TLS's own answer to received records, such as new keys."""
        if self._outgoing.pending:
            if self._unread:
                self._answered += self._outgoing.pending
            self._send()
            if self._answered > _MOST_ANSWERS:
                self.abort()

    def _send(self) -> None:
        data = self._outgoing.read()
        if data and self._socket is not None:
            self._socket.write(data)

    def _fail(self, error: ssl.SSLError) -> None:
        """Tells the client what was wrong, and closes."""
        logger.debug("a connection over TLS failed: %s", error)
        self._closing = True
        self._send()
        self._hold()

    def _hold(self) -> None:
        """Ends the connection, for anybody who knows of it; the socket closes later."""
        socket, self._socket = self._socket, None
        if socket is not None:
            self._tarpit.hold(socket)
        self.connection_lost(None)

    def _regulate(self) -> None:
        """Reads on, or does not: only while nothing waits to be decrypted."""
        if self._socket is None or self._socket.is_closing():
            return
        waiting = not self._closing and (self._paused or self._at < len(self._data))
        reading = not self._breathes and not waiting
        if reading != self._reading:
            self._reading = reading
            if reading:
                self._socket.resume_reading()
            else:
                self._socket.pause_reading()

    def _expect_end(self) -> None:
        """Gives the client its time to leave, and again as long as it reads what was written."""
        self._timer.start(self._encryption.shutdown, self._end, self.get_write_buffer_size())

    def _end(self, before: int) -> None:
        if 0 < self.get_write_buffer_size() < before:
            self._expect_end()
        else:
            self.abort()


def hand_over(protocol: asyncio.BaseProtocol, content: bytes) -> None:
    """Gives a protocol what has come, whichever kind it is."""
    if not isinstance(protocol, asyncio.BufferedProtocol):
        cast(asyncio.Protocol, protocol).data_received(content)
        return
    at = 0
    while at < len(content):
        memory = memoryview(protocol.get_buffer(len(content) - at))
        count = min(len(memory), len(content) - at)
        memory[:count] = content[at : at + count]
        at += count
        protocol.buffer_updated(count)


# Finds where TLS records end in a client's data, and whether they hold enough bytes.
_HEAD = 5
"""Bytes of a record's type, version and length."""
_MOST_FRAMING, _FRAMING_PER_BYTE = 32 * 1024, 8
"""Bytes that a client may send besides the content, and as many more for each byte of content. A record has 22 besides its
own: small frames, each in a record, come to 2 a byte."""


class TlsRecords:
    """Follows the records of one connection, without a look at what is in them."""

    def __init__(self) -> None:
        self._head = b""
        """The first bytes of a record's head, until the rest of the head has come."""
        self._left = 0
        """Bytes of the record that are still to come."""
        self._framing = _MOST_FRAMING
        """Bytes besides the content that may still come."""

    def have_content(self, size: int, content: int) -> bool:
        """Whether the client may continue after a piece of ``size`` bytes with this many of content."""
        self._framing = min(_MOST_FRAMING, self._framing + (_FRAMING_PER_BYTE + 1) * content - size)
        return self._framing >= 0

    def end_of_piece(self, data: bytes, at: int, enough: int) -> int:
        """The end of the first record at which there are enough bytes: a part of a record cannot be decrypted before its end
        arrives.

        Args:
            data: What has come.
            at: Where the piece begins: the end of the one before.
            enough: Bytes after which no further record is taken.

        Returns:
            The piece's end in ``data``.
        """
        end = at
        most = min(len(data), at + enough)
        while end < most:
            if not self._left:
                head = self._head + data[end : end + _HEAD - len(self._head)]
                end += len(head) - len(self._head)
                if len(head) < _HEAD:
                    self._head = head
                    break
                self._head, self._left = b"", int.from_bytes(head[3:], "big")
            taken = min(self._left, len(data) - end)
            self._left -= taken
            end += taken
        return end
