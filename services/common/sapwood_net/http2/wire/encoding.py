"""Decompresses messages that clients sent; none are ever sent compressed."""

from __future__ import annotations

import zlib
from typing import cast

ENCODINGS = b"identity,deflate,gzip"
"""The encodings that are understood, as ``grpc-accept-encoding`` says them."""
_TAKEN, _MADE = 16 * 1024, 64 * 1024
"""Bytes that go into a step, and at most come out of it."""
_WINDOW_BITS = {b"gzip": 16 + zlib.MAX_WBITS, b"deflate": zlib.MAX_WBITS}


class TooLargeError(Exception):
    """A message decompresses to more bytes than are taken."""


def is_known(encoding: bytes) -> bool:
    """Whether a ``grpc-encoding`` is understood."""
    return encoding == b"identity" or encoding in _WINDOW_BITS


class Unfolder:
    """Unfolds one message, a piece at a time.

    Args:
        encoding: The call's.
        message: The message.
        most_bytes: The largest that is taken; hardly more than these are made.

    Attributes:
        size: Bytes that were made.

    Raises:
        ValueError: It is not to be compressed at all.
    """

    __slots__ = ("_at", "_bits", "_decompressor", "_encoding", "_message", "_most_bytes", "_whole", "size")

    def __init__(self, encoding: bytes, message: bytes, most_bytes: int) -> None:
        bits = _WINDOW_BITS.get(encoding)
        if bits is None:
            raise ValueError("a message is compressed, though grpc-encoding names no compression")
        self.size = 0
        self._encoding = encoding.decode()
        self._message = message
        self._most_bytes = most_bytes
        self._bits = bits
        self._decompressor: zlib._Decompress | None = None
        """Made with the first step: it takes 10 KB or more, and thousands may wait."""
        self._whole = bytearray()
        self._at = 0
        """Bytes of the message that went to the decompressor."""

    def step(self) -> bytes | None:
        """Unfolds the next piece. Returns the message once it is whole.

        Raises:
            TooLargeError: It has more than ``most_bytes``.
            ValueError: It is not compressed as ``encoding`` says.
        """
        if self._decompressor is None:
            self._decompressor = zlib.decompressobj(self._bits)
        decompressor = self._decompressor
        data = decompressor.unconsumed_tail
        if not data:
            data = self._message[self._at : self._at + _TAKEN]
            self._at += _TAKEN
        try:
            piece = decompressor.decompress(data, _MADE)
        except zlib.error as error:
            raise ValueError(f"a message is not {self._encoding}: {error}") from error
        self._whole += piece
        self.size += len(piece)
        if self.size > self._most_bytes:
            raise TooLargeError
        if decompressor.eof:
            return cast(bytes, self._whole)  # which nobody changes any more
        if not piece and not data:
            raise ValueError(f"a message is not {self._encoding}: it ends early")
        return None
