"""Cuts frames out of what a connection receives, in place; for the server's end as for the client's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from h2.errors import ErrorCodes

from sapwood_common.http2.wire import frames
from sapwood_common.http2.wire.frames import (
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
"""Of a header block in frames: until there blocks are read, so that other calls go on."""
_MOST_BLOCK_FRAMES = 1024
"""Of a header block, however small they are."""
_UNASKED, _AGAIN = 2048, 512
"""Bytes of frames that are handed over before it is asked whether time is over, and before it is asked again."""
_BLOCK = 512
"""Bytes that a header block counts for, beside three times its own: it takes so much longer than others of its size."""


class FrameReceiver(Protocol):
    """Takes frames, whose padding and priorities are gone. Whatever it raises, :meth:`FrameReader.feed` raises."""

    def take_data(self, stream: int, payload: bytes, wire_bytes: int, ends: bool) -> None:
        """Data; ``wire_bytes`` of the windows are used up; ``ends`` if the stream ends with it."""
        ...

    def take_block(self, stream: int, block: bytes, ends: bool) -> None:
        """A whole header block."""
        ...

    def take_control(self, kind: int, stream: int, flags: int, payload: bytes) -> None:
        """Another frame: neither DATA, HEADERS nor CONTINUATION.

        The priority that a HEADERS frame gives its stream is none and is left out, unless it makes the stream depend on itself:
        then it comes as a PRIORITY frame after the block.
        """
        ...


class FrameReader:
    """Frames of one connection, of at most the usual size, which no peer is told that it may exceed.

    Each costs time linear in its length. Held are the beginning of a frame and of a header block.

    Attributes:
        pending: What has come of a frame that lacks its end. Not to be changed.
    """

    __slots__ = ("_block", "pending")

    def __init__(self) -> None:
        self.pending = b""
        self._block: _SplitBlock | None = None

    def feed(self, data: bytes, receiver: FrameReceiver, is_over: Callable[[], bool] | None = None) -> bool:
        """Hands over the frames that ``data`` completes.

        Args:
            data: What has come.
            receiver: Takes them.
            is_over: Says whether there is time for no more of them; not asked if they are few. None: it may take any time.

        Returns:
            Whether whole frames may be left, for which time was over: this is to be called again, perhaps without data.

        Raises:
            ConnectionFailedError: They are none.
        """
        inbound = self.pending + data if self.pending else data
        at, length = 0, len(inbound)
        look = _UNASKED
        while length - at >= HEADER:
            if at >= look and is_over is not None:
                if is_over():
                    self.pending = inbound[at:]
                    return True
                look = at + _AGAIN
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
        """Takes the next frame's. Raises ConnectionFailedError if it has become too large, or too many frames."""
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
