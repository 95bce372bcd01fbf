"""One bidirectional call that many requests share.

A message costs much more CPU than what is in it. So all pending data is sent in one message, after all ready events were
handled; data that arrives while the connection is busy is sent in the next message.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator

import grpc

from sapwood.v1 import tokenizer_pb2, worker_pb2
from sapwood_common.errors import ConfigError, SapwoodError
from sapwood_common.network.channel import MAX_MESSAGE_BYTES, Dialer
from sapwood_common.status import from_parts
from sapwood_net.http2.client.duplex_call import CallEndedError, DuplexCall
from sapwood_net.http2.client.sending import STUCK_AFTER, Sending


async def open_call(
    target: str, method: str, dialer: Dialer, timeout: float, most_bytes: int = MAX_MESSAGE_BYTES
) -> DuplexCall:
    """Connects, waits until the peer is found to speak HTTP/2, and begins a call. The caller closes it.

    Args:
        target: ``host:port``, also with gRPC's ``dns:///``, ``ipv4:`` or ``ipv6:`` before it, or ``unix:path``.
        method: The method's path.
        dialer: Knows the TLS files.
        timeout: Seconds that this may take.
        most_bytes: The largest message taken.

    Raises:
        CallEndedError: There is no connection, or the TLS files are of no use.
    """
    loop = asyncio.get_running_loop()
    path, host, port = _address(target)
    try:
        tls = dialer.context()
    except ConfigError as error:  # half written: they may be whole the next time
        raise CallEndedError(grpc.StatusCode.UNAVAILABLE, str(error)) from error
    name = dialer.name or host
    authority = "localhost" if path is not None else f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
    call = DuplexCall(authority, method, secure=tls is not None, most_bytes=most_bytes)
    try:
        async with asyncio.timeout(timeout):
            if path is not None:
                await loop.create_unix_connection(lambda: call, path)
            else:
                await loop.create_connection(
                    lambda: call, host, port, ssl=tls, server_hostname=None if tls is None else name
                )
            await call.answered()
    except TimeoutError:
        call.close()
        raise CallEndedError(grpc.StatusCode.UNAVAILABLE, f"no connection to {target} in {timeout:g} s") from None
    except (OSError, ValueError) as error:
        raise CallEndedError(grpc.StatusCode.UNAVAILABLE, f"no connection to {target}: {error}") from error
    except BaseException:
        call.close()
        raise
    return call


def _address(target: str) -> tuple[str | None, str, int]:
    """The path of a Unix socket, or a host and its port."""
    if target.startswith("unix:"):
        return target.removeprefix("unix:").removeprefix("//"), "", 0
    for scheme in ("dns:///", "dns:", "ipv4:", "ipv6:"):
        target = target.removeprefix(scheme)
    host, _, port = target.rpartition(":")
    if not host or not port.isdecimal():
        raise CallEndedError(grpc.StatusCode.UNAVAILABLE, f"{target!r} is not host:port")
    return None, host.removeprefix("[").removesuffix("]"), int(port)


def stream_error(message: worker_pb2.GenerationError | tokenizer_pb2.StreamError) -> SapwoodError:
    """The error of one stream, or of one item, of a session."""
    if isinstance(message, tokenizer_pb2.StreamError):
        service, reason = "tokenizer", message.reason
    else:
        service, reason = "worker", ""
    said = message.message or f"the {service} failed with status {message.code}"
    error = from_parts(message.code, said, message.field, reason)
    if message.HasField("retry_after_ms"):
        error.retry_after = message.retry_after_ms / 1000
    return error


logger = logging.getLogger(__name__)

RETRY_INTERVAL = 0.1
OPEN_TIMEOUT = 2.0
TOKENS_A_MESSAGE = 256 * 1024
"""A message with this many tokens takes no further request. It stays far below the size that a service accepts, even where each
request brings a grammar or tools."""
_CHECK_INTERVAL = 0.1
_LARGE = b"\xfa\xff\xff\xff\x0f\x80\x80\x01" + bytes(16 * 1024)
"""A field that no message has, larger than any packet: anybody who reads it passes over it."""
_BYTES_A_TURN = 64 * 1024
"""Bytes of messages after which the next one is made in a later turn of the event loop."""
BYTES_A_TOKEN = 4
"""Bytes of a grammar or of tools that count as one token in :data:`TOKENS_A_MESSAGE`."""


class SharedCall(ABC):
    """Carries requests over a call that is opened again whenever it is lost, while :meth:`run` runs.

    Args:
        address: Where it goes.
        method: The method's path.
        dialer: Connects.
    """

    def __init__(self, address: str, method: str, dialer: Dialer) -> None:
        self._address = address
        self._method = method
        self._dialer = dialer
        self._call: DuplexCall | None = None
        self._stands = False
        """Whether the peer has answered on the call that is open."""
        self._flushing = False
        self._finishing = False
        self._unhandled: deque[Iterator[None]] = deque()
        """Messages that came and are not handled to their end. What is in them goes all the way to clients' sockets: where
        hundreds of requests go in step, all else would wait for all of them.
        """
        self._share = dialer.share
        self._sending = Sending(None, _CHECK_INTERVAL, self._share.clock)
        self._suspect = False
        """Whether what was sent did not arrive, or seems not to, and the call has not shown better since."""

    @property
    @abstractmethod
    def load(self) -> int:
        """Requests in flight. Code that lowers it calls :meth:`_end_if_finished`."""

    @abstractmethod
    def _opened(self, call: DuplexCall) -> bytes:
        """A call was opened. Returns the message that the peer needs before any request; empty: none."""

    @abstractmethod
    def _next_message(self) -> bytes | None:
        """The next message: all that waits to be sent, or as much as one message may hold. None: nothing waits."""

    @abstractmethod
    def _take(self, message: bytes) -> Iterator[None]:
        """Handles a message from the peer; what follows a ``yield`` may wait for later turns. An exception ends the call."""

    @abstractmethod
    def _lost(self, end: CallEndedError) -> float:
        """The call was lost, or could not be opened; returns the seconds until the next try."""

    @abstractmethod
    def _stopped(self) -> None:
        """:meth:`run` has ended: what is under way has nowhere to go."""

    @property
    def passes(self) -> bool:
        """Whether nothing speaks against the way to the peer."""
        return not self._suspect

    def distrust(self) -> None:
        """The way to the peer seems blocked: :attr:`passes` is false until the next call has shown that large packets arrive."""
        self._suspect = True

    def probe(self) -> None:
        """Sends what a path with a hole swallows, so that a hole is noticed though this call has nothing to send."""
        if self._stands and self._call is not None and self._call.ready and not self._sending.open:
            self._call.write(_LARGE)

    def _stuck(self) -> None:  # noqa: B027 - most need not know
        """What is sent does not arrive; the call is about to be given up."""

    def _watch_sending(self, call: DuplexCall) -> None:
        """Gives the call up when what is sent on it does not arrive, whatever still comes from there."""
        if call.ended:
            return
        seconds = self._sending.check()
        if seconds >= STUCK_AFTER:
            self._suspect = True
            self._stuck()
            self.abandon(f"what is sent there has not arrived for {seconds:.1f} s")
            return
        self._suspect = self._suspect and not self._sending.has_arrived(len(_LARGE))
        asyncio.get_running_loop().call_later(_CHECK_INTERVAL, self._watch_sending, call)

    def finish(self) -> None:
        """No request will come any more: :meth:`run` returns once none is under way."""
        self._finishing = True
        self._end_if_finished()

    def abandon(self, problem: str) -> None:
        """Gives the call up, if there is one."""
        if self._call is not None:
            self._call.close(problem)

    async def run(self) -> None:
        """Keeps the call open until :meth:`finish`; cancel it to stop."""
        try:
            while not (self._finishing and not self.load):
                end = await self._carry()
                self._stands = False
                if (
                    end.code is grpc.StatusCode.UNIMPLEMENTED
                ):  # no call will ever stand to show that large packets arrive
                    self._suspect = False
                await asyncio.sleep(self._lost(end))
        finally:
            self._stands = False
            self._stopped()

    async def _carry(self) -> CallEndedError:
        """Opens a call, and sends and takes messages until it ends; returns how."""
        try:
            call = self._call = await open_call(self._address, self._method, self._dialer, self._patience())
            self._sending = Sending(call.socket, _CHECK_INTERVAL, self._share.clock)
            first = self._opened(call)
            if self._suspect:  # small packets may pass where large ones do not
                first += _LARGE
            if first:
                call.write(first)
            asyncio.get_running_loop().call_later(_CHECK_INTERVAL, self._watch_sending, call)
            call.follow(self._received, self._flush)
            self._flush()
            self._end_if_finished()
            end = await call.wait_ended()
            self._handle(lambda: False)  # what came before the end counts
            return end
        except CallEndedError as error:
            return error
        except Exception as error:
            return CallEndedError(grpc.StatusCode.INTERNAL, self._told(error))
        finally:
            if self._call is not None:
                self._call.close()
            self._share.drop(self)
            self._unhandled.clear()
            self._call = None

    def _received(self, message: bytes) -> None:
        self._unhandled.append(self._take(message))
        if len(self._unhandled) == 1:
            share = self._share
            if not share.is_over():
                self._handle(share.is_over)
            share.end()
            if self._unhandled:
                self._share.add(self)
                if self._call is not None:
                    self._call.set_reading(False)

    def go_on(self, until: float) -> bool:
        """Handles more of what came; as ``time_share.Worker``."""
        clock = self._share.clock
        self._handle(lambda: clock() >= until)
        if not self._unhandled and self._call is not None:
            self._call.set_reading(True)
        return bool(self._unhandled)

    def _handle(self, is_over: Callable[[], bool]) -> None:
        try:
            while self._unhandled:
                for _ in self._unhandled[0]:
                    if is_over():
                        return
                self._unhandled.popleft()
                if self._unhandled and is_over():
                    return
        except Exception as error:
            self._unhandled.clear()
            self.abandon(self._told(error))

    def _told(self, error: Exception) -> str:
        """Logs an error of our own, which ends this call but not those that are opened later; returns it in words."""
        logger.error("the call %s at %s failed", self._method, self._address, exc_info=error)
        return f"{type(error).__name__}: {error}"

    def _patience(self) -> float:
        """Seconds that opening a call may take."""
        return OPEN_TIMEOUT

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
        call, sent = self._call, 0
        while call is not None and call.ready and (message := self._next_message()) is not None:
            call.write(message)
            sent += len(message)
            if sent >= _BYTES_A_TURN:
                self._schedule()
                return

    def _end_if_finished(self) -> None:
        if self._finishing and not self.load:
            self.abandon("its peer left")
