"""Cuts frames out of the bytes that a connection receives, in place; for either end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from h2.errors import ErrorCodes

from sapwood_net.http2.wire import frames
from sapwood_net.http2.wire.frames import (
    CONTINUATION,
    DATA,
    END_STREAM,
    HEADER,
    HEADERS,
    PADDED,
    USUAL_FRAME,
    ConnectionFailedError,
)

_MOST_BLOCK_BYTES = 96 * 1024
"""The most bytes of a header block of several frames; a larger one ends the connection."""
_MOST_BLOCK_FRAMES = 1024
"""The most frames of a header block, however small they are."""
_UNASKED, _AGAIN = 2048, 512
"""Bytes of frames that are handed over before the first question whether time is over, and between two questions."""
_BLOCK = 512
"""Bytes that a header block counts for besides three times its own: it takes that much longer than other frames."""


class FrameReceiver(Protocol):
    """Takes frames without their padding and priorities. :meth:`FrameReader.feed` raises the errors of its methods."""

    def take_data(self, stream: int, payload: bytes, wire_bytes: int, ends: bool) -> None:
        """Takes data, which uses up ``wire_bytes`` of the windows; ``ends`` if the stream ends with it."""
        ...

    def take_block(self, stream: int, block: bytes, ends: bool) -> None:
        """Takes a whole header block."""
        ...

    def take_control(self, kind: int, stream: int, flags: int, payload: bytes) -> None:
        """Takes any other frame than DATA, HEADERS and CONTINUATION.

        The priority in a HEADERS frame is left out, unless it makes the stream depend on itself: then it comes as a PRIORITY
        frame after the block.
        """
        ...


class FrameReader:
    """Reads the frames of one connection. None may be larger than the usual size: peers are never offered more.

    Each costs time linear in its length. Held are at most the beginning of a frame and of a header block.

    Args:
        stranger: Whether the first ping comes sooner, because the peer is not known yet.

    Attributes:
        pending: The beginning of a frame whose end has not come. Not to be changed.
        stranger: See there.
    """

    __slots__ = ("_block", "pending", "stranger")

    def __init__(self, *, stranger: bool = False) -> None:
        self.pending = b""
        self.stranger = stranger
        self._block: _SplitBlock | None = None

    def feed(self, data: bytes, receiver: FrameReceiver, is_over: Callable[[], bool] | None = None) -> bool:
        """Hands over the frames that ``data`` completes.

        Args:
            data: What has come.
            receiver: Takes them.
            is_over: Says whether time is over; not asked about the first few frames, and not heeded about DATA that follows a
                call's head. None: there is no limit.

        Returns:
            Whether whole frames may be left because time was over: call it again later, if need be without data.

        Raises:
            ConnectionFailedError: The bytes are no frames, or not in an order that RFC 9113 allows.
        """
        inbound = self.pending + data if self.pending else data
        at, length = 0, len(inbound)
        look = _AGAIN if self.stranger else _UNASKED if length <= _UNASKED else 0
        kind = -1
        while length - at >= HEADER:
            if at >= look and is_over is not None:
                if not is_over():
                    look = at + _AGAIN
                elif kind != HEADERS or inbound[at + 3] != DATA:  # a call's request goes with its head
                    self.pending = inbound[at:]
                    return True
            size = int.from_bytes(inbound[at : at + 3], "big")
            if size > USUAL_FRAME:
                raise ConnectionFailedError(ErrorCodes.FRAME_SIZE_ERROR, f"a frame of more bytes than allowed: {size}")
            end = at + HEADER + size
            if end > length:
                break
            kind, flags = inbound[at + 3], inbound[at + 4]
            stream = int.from_bytes(inbound[at + 5 : at + 9], "big") & 0x7FFFFFFF
            payload = inbound[at + HEADER : end]
            at = end
            if self._block is not None or kind == CONTINUATION:
                self._take_continuation(kind, stream, flags, payload, receiver)
            elif kind == DATA:
                if flags & PADDED:
                    payload = _unpadded(payload)
                receiver.take_data(stream, payload, size, flags & END_STREAM != 0)
            elif kind == HEADERS:
                look -= _BLOCK + 2 * size
                self._take_headers(stream, flags, payload, receiver)
            else:
                receiver.take_control(kind, stream, flags, payload)
        self.pending = inbound[at:]
        return False

    def _take_headers(self, stream: int, flags: int, payload: bytes, receiver: FrameReceiver) -> None:
        block = _unpadded(payload) if flags & frames.PADDED else payload
        priority = b""
        if flags & frames.WITH_PRIORITY:
            if len(block) < frames.PRIORITY_SIZE:
                raise ConnectionFailedError(ErrorCodes.FRAME_SIZE_ERROR, "a priority that is none")
            if frames.depends_on(block) == stream:
                priority = block[: frames.PRIORITY_SIZE]
            block = block[frames.PRIORITY_SIZE :]
        ends = bool(flags & frames.END_STREAM)
        if flags & frames.END_HEADERS:
            _hand_over(stream, block, ends, priority, receiver)
        else:
            self._block = _SplitBlock(stream, block, ends, priority)

    def _take_continuation(self, kind: int, stream: int, flags: int, payload: bytes, receiver: FrameReceiver) -> None:
        block = self._block
        if kind != frames.CONTINUATION:
            raise ConnectionFailedError(ErrorCodes.PROTOCOL_ERROR, "another frame within a header block")
        if block is None or block.stream != stream:
            raise ConnectionFailedError(ErrorCodes.PROTOCOL_ERROR, "a continuation of nothing")
        block.add(payload)
        if flags & frames.END_HEADERS:
            self._block = None
            _hand_over(stream, bytes(block.data), block.ends, block.priority, receiver)


class _SplitBlock:
    """A header block of several frames."""

    def __init__(self, stream: int, data: bytes, ends: bool, priority: bytes) -> None:
        self.stream = stream
        self.data = bytearray(data)
        self.ends = ends
        self.priority = priority
        self._frames = 1

    def add(self, data: bytes) -> None:
        """Adds the next frame's bytes. Raises ConnectionFailedError if the block has too many bytes or frames."""
        self.data += data
        self._frames += 1
        if len(self.data) > _MOST_BLOCK_BYTES or self._frames > _MOST_BLOCK_FRAMES:
            raise ConnectionFailedError(ErrorCodes.ENHANCE_YOUR_CALM, "headers without an end")


def _hand_over(stream: int, block: bytes, ends: bool, priority: bytes, receiver: FrameReceiver) -> None:
    receiver.take_block(stream, block, ends)
    if priority:
        receiver.take_control(frames.PRIORITY, stream, 0, priority)


def _unpadded(payload: bytes) -> bytes:
    if not payload or payload[0] >= len(payload):
        raise ConnectionFailedError(ErrorCodes.PROTOCOL_ERROR, "more padding than there is")
    return payload[1 : len(payload) - payload[0]]
