"""Compressed messages: read, never written."""

from __future__ import annotations

import zlib

ENCODINGS = b"identity,deflate,gzip"
"""What is understood, for ``grpc-accept-encoding``."""
_WINDOW_BITS = {b"gzip": 16 + zlib.MAX_WBITS, b"deflate": zlib.MAX_WBITS}


class TooLargeError(Exception):
    """A message unfolds to more than is taken."""


def is_known(encoding: bytes) -> bool:
    """Whether a ``grpc-encoding`` is understood."""
    return encoding == b"identity" or encoding in _WINDOW_BITS


def decompress(encoding: bytes, message: bytes, most_bytes: int) -> bytes:
    """The message.

    Raises:
        TooLargeError: It has more than ``most_bytes``; no more than these were made.
        ValueError: It is not compressed as ``encoding`` says, or not to be compressed at all.
    """
    bits = _WINDOW_BITS.get(encoding)
    if bits is None:
        raise ValueError("a message is compressed, though grpc-encoding names no compression")
    decompressor = zlib.decompressobj(bits)
    try:
        found = decompressor.decompress(message, most_bytes + 1)
    except zlib.error as error:
        raise ValueError(f"a message is not {encoding.decode()}: {error}") from error
    if len(found) > most_bytes:
        raise TooLargeError
    if not decompressor.eof:
        raise ValueError(f"a message is not {encoding.decode()}: it ends early")
    return found
