"""Cuts frames out of what a connection receives, in place; for the server's end as for the client's."""

from __future__ import annotations

from typing import Protocol

from h2.errors import ErrorCodes

from sapwood_common.http2 import frames
from sapwood_common.http2.frames import ConnectionFailedError

_MOST_BLOCK_BYTES = 256 * 1024
"""Of a header block in frames, with the frames' headers: until there blocks are read, so that other calls go on."""


class FrameReceiver(Protocol):
    """Takes frames, whose padding and priorities are gone. Whatever it raises, :meth:`FrameReader.feed` raises."""

    def take_data(self, stream: int, payload: bytes, wire_bytes: int, ends: bool) -> None:
        """Data; ``wire_bytes`` of the windows are used up; ``ends`` if the stream ends with it."""
        ...

    def take_block(self, stream: int, block: bytes, ends: bool) -> None:
        """A whole header block."""
        ...

    def take_control(self, kind: int, stream: int, flags: int, payload: bytes) -> None:
        """Another frame: neither DATA, HEADERS nor CONTINUATION."""
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

    def feed(self, data: bytes, receiver: FrameReceiver) -> None:
        """Hands over the frames that ``data`` completes.

        Raises:
            ConnectionFailedError: They are none.
        """
        inbound = self.pending + data if self.pending else data
        at, length = 0, len(inbound)
        while length - at >= frames.HEADER:
            size = int.from_bytes(inbound[at : at + 3], "big")
            if size > frames.USUAL_FRAME:
                raise ConnectionFailedError(ErrorCodes.FRAME_SIZE_ERROR, f"a frame of more bytes than allowed: {size}")
            end = at + frames.HEADER + size
            if end > length:
                break
            kind, flags = inbound[at + 3], inbound[at + 4]
            stream = int.from_bytes(inbound[at + 5 : at + 9], "big") & 0x7FFFFFFF
            payload = inbound[at + frames.HEADER : end]
            at = end
            if self._block is not None or kind == frames.CONTINUATION:
                self._take_continuation(kind, stream, flags, payload, receiver)
            elif kind == frames.DATA:
                if flags & frames.PADDED:
                    payload = _unpadded(payload)
                receiver.take_data(stream, payload, size, bool(flags & frames.END_STREAM))
            elif kind == frames.HEADERS:
                self._take_headers(stream, flags, payload, receiver)
            else:
                receiver.take_control(kind, stream, flags, payload)
        self.pending = inbound[at:]

    def _take_headers(self, stream: int, flags: int, payload: bytes, receiver: FrameReceiver) -> None:
        block = _unpadded(payload) if flags & frames.PADDED else payload
        if flags & frames.WITH_PRIORITY:
            if len(block) < 5:
                raise ConnectionFailedError(ErrorCodes.FRAME_SIZE_ERROR, "a priority that is none")
            block = block[5:]
        ends = bool(flags & frames.END_STREAM)
        if flags & frames.END_HEADERS:
            receiver.take_block(stream, block, ends)
        else:
            self._block = _SplitBlock(stream, block, ends)

    def _take_continuation(self, kind: int, stream: int, flags: int, payload: bytes, receiver: FrameReceiver) -> None:
        block = self._block
        if kind != frames.CONTINUATION:
            raise ConnectionFailedError(ErrorCodes.PROTOCOL_ERROR, "another frame within a header block")
        if block is None or block.stream != stream:
            raise ConnectionFailedError(ErrorCodes.PROTOCOL_ERROR, "a continuation of nothing")
        block.add(payload)
        if flags & frames.END_HEADERS:
            self._block = None
            receiver.take_block(stream, bytes(block.data), block.ends)


class _SplitBlock:
    """A header block of several frames."""

    def __init__(self, stream: int, data: bytes, ends: bool) -> None:
        self.stream = stream
        self.data = bytearray(data)
        self.ends = ends
        self._wire_bytes = len(data)

    def add(self, data: bytes) -> None:
        """Takes the next frame's. Raises ConnectionFailedError if it has become too large, be the frames empty."""
        self.data += data
        self._wire_bytes += frames.HEADER + len(data)
        if self._wire_bytes > _MOST_BLOCK_BYTES:
            raise ConnectionFailedError(ErrorCodes.ENHANCE_YOUR_CALM, "headers without an end")


def _unpadded(payload: bytes) -> bytes:
    if not payload or payload[0] >= len(payload):
        raise ConnectionFailedError(ErrorCodes.PROTOCOL_ERROR, "more padding than there is")
    return payload[1 : len(payload) - payload[0]]
