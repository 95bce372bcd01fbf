"""Connections that are begun and not gone on with, or slowly, a thousand or so at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from floods.flood import Flood
from floods.wire import GREETING, HEALTH, call_block, call_headers, message

from sapwood_net.http2.wire import frames

_TIMES = 100
"""Connections for each of the attacker's."""
_CLIENT_HELLO = bytes.fromhex("16030100f8010000f403036a6a") + bytes(100)
"""The beginning of one: more is announced than comes."""
_HEALTH = call_block(HEALTH)
_POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 60000\r\n\r\n"


def _once(data: bytes) -> Callable[[int], Iterator[bytes]]:
    return lambda _: iter((data,))


def _drops(first: bytes, then: bytes) -> Callable[[int], Iterator[bytes]]:
    return lambda _: itertools.chain((first,), itertools.repeat(then))


IDLE_FLOODS = (
    Flood("half-open TLS handshakes", "grpc", _once(_CLIENT_HELLO), times=_TIMES, raw=True),
    Flood("gRPC connections of one byte", "grpc", _once(b"P"), times=_TIMES),
    Flood("gRPC connections that say nothing", "grpc", _once(GREETING), times=_TIMES),
    Flood(
        "half a message on each connection",
        "grpc",
        _once(GREETING + call_headers(1, _HEALTH) + frames.frame(frames.DATA, 0, 1, message(bytes(60_000))[:16_000])),
        times=_TIMES,
    ),
    Flood("HTTP connections of one byte", "http", _once(b"G"), times=_TIMES),
    Flood(
        "half an HTTP head on each connection",
        "http",
        _once(b"GET /health HTTP/1.1\r\na: " + b"a" * 60_000),
        times=_TIMES,
    ),
    Flood("half an HTTP body on each connection", "http", _once(_POST + b"a" * 50_000), times=_TIMES),
    Flood("HTTP heads a byte a second", "http", _drops(b"GET /health HTTP/1.1\r\n", b"a"), pause=1.0, times=_TIMES),
)
