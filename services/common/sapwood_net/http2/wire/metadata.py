"""gRPC's metadata, deadlines and statuses in HTTP/2's header fields (gRPC over HTTP2, "PROTOCOL-HTTP2.md")."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from urllib.parse import quote

import grpc

from sapwood_net.http2.wire import frames
from sapwood_net.http2.wire.header_reader import Headers

Metadata = tuple[tuple[str, str | bytes], ...]

_OF_HTTP2 = frozenset(
    (b"te", b"content-type", b"grpc-timeout", b"grpc-encoding", b"grpc-accept-encoding", b"content-length")
)
_SECONDS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_PLAIN = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")
_OPENING = frames.STATUS_200 + frames.literal(b"content-type", b"application/grpc")
_OK = frames.literal(b"grpc-status", b"0")


def read_metadata(headers: Headers) -> Metadata:
    """The caller's metadata; values of ``-bin`` keys as bytes. Values that are not base64 are left out."""
    found: list[tuple[str, str | bytes]] = []
    for name, value in headers:
        if name.startswith(b":") or name in _OF_HTTP2:
            continue
        key = name.decode("latin-1")
        if not key.endswith("-bin"):
            found.append((key, value.decode("latin-1")))
            continue
        for part in value.split(b","):
            try:
                found.append((key, base64.b64decode(part + b"=" * (-len(part) % 4), validate=True)))
            except binascii.Error:
                continue
    return tuple(found)


def read_timeout(value: bytes) -> float | None:
    """Seconds that ``grpc-timeout`` grants; None if it is malformed."""
    text = value.decode("latin-1")
    unit = _SECONDS.get(text[-1:])
    if unit is None or not text[:-1].isdecimal() or len(text) > 9:
        return None
    return int(text[:-1]) * unit


def opening_block(metadata: Iterable[tuple[str, str | bytes]] = ()) -> bytes:
    """The header block with which a response begins."""
    return _OPENING + metadata_block(metadata)


def closing_block(code: grpc.StatusCode, details: str, metadata: bytes) -> bytes:
    """The header block with which a response ends; ``metadata`` is a :func:`metadata_block`. Does not raise."""
    if code is grpc.StatusCode.OK and not details:
        return _OK + metadata
    # Header fields hold ASCII only, so the message is percent-encoded UTF-8.
    message = quote(str(details), safe=_PLAIN, errors="replace").encode("ascii")
    return frames.literal(b"grpc-status", b"%d" % code.value[0]) + frames.literal(b"grpc-message", message) + metadata


def metadata_block(metadata: Iterable[tuple[str, str | bytes]]) -> bytes:
    """Metadata as header fields.

    Raises:
        TypeError, ValueError, AttributeError: It is no metadata.
    """
    return b"".join(
        frames.literal(
            key.lower().encode("latin-1"),
            value.encode("latin-1", "replace") if isinstance(value, str) else base64.b64encode(value).rstrip(b"="),
        )
        for key, value in metadata
    )
