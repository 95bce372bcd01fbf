"""HTTP/2 frames and header blocks as bytes (RFC 9113, RFC 7541)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from h2.errors import ErrorCodes

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""The bytes with which a client begins a connection."""
HEADER = 9
"""Bytes before each frame's payload."""
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED, WITH_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
PRIORITY_SIZE = 5
USUAL_WINDOW = 65_535
LARGEST_WINDOW = 2**31 - 1
USUAL_FRAME = 16_384
LARGEST_FRAME = 2**24 - 1
LAST_STREAM = 2**31 - 1


class ConnectionFailedError(Exception):
    """The peer broke the protocol in a way that ends the connection."""

    def __init__(self, code: ErrorCodes, message: str) -> None:
        super().__init__(message)
        self.code = code


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A frame."""
    return b"%b%c%c%b%b" % (len(payload).to_bytes(3, "big"), kind, flags, stream.to_bytes(4, "big"), payload)


def header_frames(stream: int, block: bytes, largest: int, *, end: bool = False) -> bytes:
    """A header block in frames of at most ``largest`` bytes of payload each; ``end`` ends the stream with it."""
    flags = END_STREAM if end else 0
    if len(block) <= largest:
        return frame(HEADERS, flags | END_HEADERS, stream, block)
    parts = [frame(HEADERS, flags, stream, block[:largest])]
    for at in range(largest, len(block), largest):
        last = END_HEADERS if at + largest >= len(block) else 0
        parts.append(frame(CONTINUATION, last, stream, block[at : at + largest]))
    return b"".join(parts)


def check_size(payload: bytes, size: int, known: bool) -> None:
    """Raises ConnectionFailedError unless the payload has ``size`` bytes and the frame's stream is known."""
    if len(payload) != size:
        raise ConnectionFailedError(ErrorCodes.FRAME_SIZE_ERROR, "a frame of another size")
    if not known:
        raise ConnectionFailedError(ErrorCodes.PROTOCOL_ERROR, "a frame for a stream that there is not")


def depends_on(priority: bytes) -> int:
    """The stream on which a priority makes its own depend (RFC 7540, 6.3; RFC 9113 gives it no meaning any more)."""
    return int.from_bytes(priority[:4], "big") & 0x7FFFFFFF


def settings(values: Iterable[tuple[int, int]]) -> bytes:
    """A SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(key.to_bytes(2, "big") + value.to_bytes(4, "big") for key, value in values))


def parse_settings(payload: bytes) -> Iterator[tuple[int, int]]:
    """The settings in a SETTINGS frame; its length is a multiple of six."""
    for at in range(0, len(payload), 6):
        yield int.from_bytes(payload[at : at + 2], "big"), int.from_bytes(payload[at + 2 : at + 6], "big")


def window_update(stream: int, increment: int) -> bytes:
    """A WINDOW_UPDATE frame."""
    return frame(WINDOW_UPDATE, 0, stream, increment.to_bytes(4, "big"))


def reset(stream: int, code: int) -> bytes:
    """A RST_STREAM frame."""
    return frame(RST_STREAM, 0, stream, code.to_bytes(4, "big"))


def literal(name: bytes, value: bytes) -> bytes:
    """A header field that does not enter the peer's table: who sends only such fields need not remember what was sent before."""
    return b"%c%b%b%b%b" % (0, _length(name), name, _length(value), value)


NO_TABLE = b"\x20"
"""Goes before a connection's first header field: sets the size of the table to 0, as no field will ever enter it."""
STATUS_200 = b"\x88"
"""The header field ``:status: 200``."""


def _length(text: bytes) -> bytes:
    """The length of a string without Huffman code: an integer with a prefix of 7 bits (RFC 7541, 5.1 and 5.2)."""
    rest = len(text) - 127
    if rest < 0:
        return bytes((len(text),))
    out = bytearray((127,))
    while rest >= 128:
        out.append(rest % 128 + 128)
        rest //= 128
    out.append(rest)
    return bytes(out)
