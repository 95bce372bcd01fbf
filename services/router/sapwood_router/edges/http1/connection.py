"""One client's connection: its requests one after another, each read when the one before was answered.

Data that it has sent ahead waits unread, and is little. Work is done in small steps, and long work takes turns with other
connections (:class:`TimeShare`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import cast

from sapwood_common.errors import SapwoodError
from sapwood_net.http2.server.waiting_line import Place
from sapwood_net.pacing.timer import Timer
from sapwood_router.edges.http1.body import Body
from sapwood_router.edges.http1.errors import HttpError
from sapwood_router.edges.http1.held_bytes import LIGHT, HeldBytes
from sapwood_router.edges.http1.host import ConnectionHost
from sapwood_router.edges.http1.request import Request

logger = logging.getLogger(__name__)

_MOST_DROPPED = 64 * 1024
"""The most bytes of an unwanted body that are read to keep the connection; for a larger one the connection is closed."""
_MOST_LINGERED = 256 * 1024
"""Bytes that are read after the last answer: with some of them unread, the kernel would take the answer back."""
_MOST_REFUSED = 32 * 1024 * 1024
"""The same after a refused body: its client mostly sends all of it before it reads the answer."""
_MOST_PIECES, _PIECE_SECONDS = 4, 0.02
"""A head that has come in more pieces is read on as seldom: a byte each costs as much as a whole head."""
_TLS_HANDSHAKE = 0x16
"""The first byte of a client that speaks TLS."""
_END_OF_LINE, _EMPTY_LINE = b"\r\n", b"\r\n\r\n"
_PLAIN = [(b"content-type", b"text/plain; charset=utf-8")]


class HttpConnection(asyncio.BufferedProtocol):
    """One client's connection. Implements ``HostedConnection``, ``RequestConnection``, ``HeldBody`` and ``time_share.Worker``.

    Args:
        host: The server.

    Attributes:
        rests_since: When the client was last answered, on the event loop's clock.
        write_paused: Whether the client does not read what was written.
    """

    def __init__(self, host: ConnectionHost) -> None:
        self.rests_since = 0.0
        self.write_paused = False
        self.writes = host.writes
        self.heads = host.heads
        self._host = host
        self._limits = host.limits
        self._transport: asyncio.Transport | None = None
        self._encrypted = False
        self._data = b""
        """Bytes received; those before ``_at`` are handled."""
        self._at = 0
        self._held = HeldBytes(host.bodies)
        self._request: Request | None = None
        """The request that is being answered, or whose body is still coming."""
        self._place: Place | None = None
        """The place in the queue of the latest request that had to wait before it began."""
        self._queued = False
        """Whether this connection waits for its turn to handle more of ``_data``."""
        self._reading = True
        self._breathes = False
        """Whether it filled the shared buffer and so pauses reading until its next step."""
        self._pieces = 0
        """The pieces in which the awaited head has come so far."""
        self._lingers = False
        """Whether the last answer was sent, and what still comes is dropped."""
        self._lingering = 0
        """Bytes that may still be dropped before the connection is closed anyway."""
        self._timer = Timer()
        """Ends the wait for a head, for more of a body, or for the client to leave."""
        self._drained: asyncio.Event | None = None

    @property
    def transport(self) -> asyncio.Transport:
        assert self._transport is not None
        return self._transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._held.encrypted = self._encrypted = transport.get_extra_info("sslcontext") is not None
        self._host.made(self)
        self._rest()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.stop()
        self._data, self._at, self._lingers = b"", 0, True
        self._host.lost(self)
        self._host.bodies.release(self)
        self._held.drop()
        self._host.share.drop(self)
        if self._place is not None:
            self._place.leave()
            self._place = None
        request, self._request = self._request, None
        if request is not None:
            request.lose_client()
        self.resume_writing()
        self._transport = None  # over TLS it refers to this object: neither is to wait for the collector

    def eof_received(self) -> bool:
        """Has the connection close, whether or not the client still reads."""
        return False

    def pause_writing(self) -> None:
        self.write_paused = True
        if self._transport is not None:
            self._held.begin_unread(self, self._transport)

    def resume_writing(self) -> None:
        self.write_paused = False
        self._held.end_unread(self)
        if self._drained is not None:
            self._drained.set()
            self._drained = None
        if self._at < len(self._data) and self._request is None:
            self._queue()

    async def drained(self) -> None:
        if self.write_paused:
            if self._drained is None:
                self._drained = asyncio.Event()
            await self._drained.wait()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._host.input

    def buffer_updated(self, nbytes: int) -> None:
        source, request = self._host.input, self._request
        if self._lingers:
            self._lingering -= nbytes
            if self._lingering < 0:
                self._hold()
                return
        else:
            came = bytes(source[:nbytes])
            self._data = came if self._at == len(self._data) else self._data[self._at :] + came
            self._at = 0
            if not self._queued and (request is None or not request.body.complete):
                self._work(self._host.share.is_over)
                if self._host.share.measuring:
                    self._host.share.end()
        if nbytes == len(source) and self._transport is not None:  # or the event loop would go on reading this one
            self._breathes = True
            self._queue()
        self._regulate()

    def stays_open(self) -> bool:
        request = self._request
        if request is None or not request.head.keep_alive or self._host.stopping:
            return False
        return request.body.error is None and request.body.left_at_most(_MOST_DROPPED)

    def expect_body(self) -> None:
        request = self._request
        if request is not None:
            self._timer.start(self._limits.body_seconds, self._check_pace, request.body.size)
            if self._at < len(self._data):
                self._queue()
            self._regulate()

    def answered(self) -> None:
        request = self._request
        assert request is not None
        if not request.keeps_open or request.body.error is not None:
            self._linger()
        elif request.body.complete:
            self._next()
        else:
            request.body.drop()
            self._timer.start(self._limits.head_seconds, self._give_up)
            self._regulate()

    def abort(self) -> None:
        # In the next turn of the loop: what calls this may write after the call.
        if self._transport is not None:
            asyncio.get_running_loop().call_soon(self._transport.abort)
            self._breathes = True
            self._regulate()

    def fail(self, error: SapwoodError) -> None:
        """Gives up what this connection holds: all of them together hold too much, and this one the most."""
        self._held.drop()
        if self._request is None and not self._lingers and not self.write_paused:
            self._refuse(HttpError(503, error.message))
        else:
            self._data, self._at = b"", 0
            self.abort()

    def close(self) -> None:
        """Closes an idle connection; one whose request is being answered closes after the answer, as the host is stopping."""
        if self._request is None and not self._lingers:
            self._close()

    def go_on(self, until: float) -> bool:
        self._queued = False
        if self._breathes:
            self._host.breaths.enter(self._read_on)
        clock = self._host.share.clock
        self._work(lambda: clock() >= until)
        self._regulate()
        return self._queued

    def _read_on(self) -> None:
        if self._transport is not None:
            self._breathes = False
            self._regulate()

    def _work(self, is_over: Callable[[], bool]) -> None:
        """Takes steps as long as there is time, and queues the rest for later."""
        try:
            while not is_over():
                if not self._advance():
                    return
        except Exception:
            logger.exception("a connection is given up")
            self.abort()
        else:
            self._queue()

    def _advance(self) -> bool:
        """A step; says whether there is another to do now."""
        if self._lingers or (self._request is None and (self.write_paused or not self._take_head())):
            return False
        request = self._request
        assert request is not None
        body = request.body
        if self._at < len(self._data) and body.hungry:
            self._at = body.feed(self._data, self._at)
            if body.complete:
                self._timer.stop()
            if request.over and body.error is not None:
                self._linger()
            elif request.over and body.complete:
                self._next()
        return self._at < len(self._data) and (self._request is None or body.hungry)

    def _take_head(self) -> bool:
        """Reads the next request up to its body, and lets it begin; says whether there was one."""
        data, begin = self._data, self._at
        if data.startswith(_END_OF_LINE, begin):  # some clients send one more after a body
            begin += len(_END_OF_LINE)
        end = data.find(_EMPTY_LINE, begin) + len(_EMPTY_LINE)
        whole, most = end >= len(_EMPTY_LINE), self._limits.head_bytes
        if end - begin > most if whole else len(data) - begin >= most:
            self._refuse(HttpError(431, f"line and headers of a request are over {most} bytes"))
            return False
        if not whole:
            if begin < len(data):
                if data[begin] == _TLS_HANDSHAKE:  # its end would never come: it waits for an answer
                    self._refuse(HttpError(400, "this port speaks HTTP without TLS: the URL begins with http://"))
                else:
                    self._take_piece()
            return False
        self._pieces = 0
        self._timer.stop()
        self._at = end
        try:
            head, length = self._host.requests.read(data[begin:end])
        except HttpError as error:
            self._refuse(error)
            return False
        self._host.works(self)
        request = self._request = Request(self, head, Body(length, self._host.bodies))
        turnstile = self._host.turnstile
        if turnstile.busy:
            self._place = turnstile.enter(partial(self._host.begin, request), self._host.rank(head.headers))
        else:
            turnstile.enter(partial(self._host.begin, request))
        return True

    def _take_piece(self) -> None:
        if not self._timer.running:
            self._timer.start(self._limits.head_seconds, self._give_up)
        self._pieces += 1
        if self._pieces > _MOST_PIECES and not self._breathes:
            self._breathes = True
            asyncio.get_running_loop().call_later(_PIECE_SECONDS, self._read_on)

    def _next(self) -> None:
        """The request is answered and read to its end: the next one's turn."""
        self._timer.stop()
        self._request = self._place = None
        if self._host.stopping:
            self._close()
            return
        self._rest()
        if self._at < len(self._data):
            self._queue()
        self._regulate()

    def _rest(self) -> None:
        self.rests_since = self._host.loop.time()
        self._host.rests(self)

    def _queue(self) -> None:
        if not self._queued:
            self._queued = True
            little = len(self._data) - self._at <= LIGHT
            self._host.share.add(self, light=little and self.transport.get_extra_info("light", True))

    def _regulate(self) -> None:
        """Reads on, or does not: as long as less than a head's bytes wait, and of a body what is asked for."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        body = None if self._request is None else self._request.body
        idle, waiting = body is None or body.complete, len(self._data) - self._at
        if self._reading and idle and not (waiting or self._breathes or self._held.counted):
            return  # the usual case
        if waiting > LIGHT or self._held.counted:
            self._held.weigh(self, waiting)
            if self._transport is None:  # it held the most
                return
        # The bytes read ahead of an answer: just enough to notice whether the client is still there.
        most = LIGHT if idle and body is not None else self._limits.head_bytes
        reading = not self._breathes and waiting < most and (body is None or idle or body.hungry)
        if reading != self._reading:
            self._reading = reading
            switch = transport.resume_reading if reading else transport.pause_reading
            switch()

    def _check_pace(self, before: int) -> None:
        """Abandons a body that has grown too slowly since it had ``before`` bytes."""
        request = self._request
        if request is None or request.body.complete:
            return
        if request.body.size - before < self._limits.body_bytes:
            request.body.fail(HttpError(408, "the body comes too slowly"))
        else:
            self._timer.start(self._limits.body_seconds, self._check_pace, request.body.size)

    def _give_up(self) -> None:
        if self._request is None:
            self._refuse(HttpError(408, "the request's head did not come to its end"))
        else:
            self.abort()

    def _refuse(self, error: HttpError) -> None:
        """Answers what is no request, and ends the connection."""
        logger.debug("refused: %s", error.message)
        body = error.message.encode() + b"\n"
        framing = b"content-length: %d\r\nconnection: close\r\n" % len(body)
        self.writes.add(self.transport, self.heads.make(error.status, _PLAIN, framing) + body)
        self._hold()

    def _hold(self) -> None:
        """Ends the connection of a client that sends what is no request, or sends on after the last answer."""
        self.writes.flush(self.transport)
        if not self.transport.is_closing():
            self._host.tarpit.hold(self.transport)
            self.connection_lost(None)

    def _linger(self) -> None:
        """After the last answer. Data that the client still sends is read and dropped for a while, or the kernel would take the
        answer
        back. Over TLS this always waits for the client: its data may not be decrypted yet.
        """
        request, self._request = self._request, None
        sent_on = len(self._data) - self._at > len(_END_OF_LINE)
        if sent_on and request is not None and not request.head.keep_alive and request.body.complete:
            self._hold()  # it said that this would be its last request
            return
        unread = self._at < len(self._data) or request is None or not request.body.complete
        self._data, self._at = b"", 0
        if not unread and not self._encrypted:
            self._close()
            return
        self._lingers = True
        self._lingering = _MOST_LINGERED if request is None or request.body.complete else _MOST_REFUSED
        self._host.works(self)
        self.writes.flush(self.transport)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._wait_for_leave()
        self._regulate()

    def _close(self) -> None:
        self._lingers = True
        self._host.works(self)
        self.writes.flush(self.transport)
        self.transport.close()
        self._wait_for_leave()

    def _wait_for_leave(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        seconds = self._limits.flush_seconds if unsent else self._limits.linger_seconds
        self._timer.start(seconds, self._leave, unsent, self._lingering)

    def _leave(self, unsent: int, lingering: int) -> None:
        """Closes, unless the client has read some of the bytes that were unsent and there are more, or still sends a refused body
        at a good rate. ``unsent`` and ``lingering`` are what they were at the last look."""
        reads = 0 < self.transport.get_write_buffer_size() < unsent
        sends = lingering - self._lingering >= self._limits.body_bytes
        if reads or sends:
            self._wait_for_leave()
        else:
            self.abort()
