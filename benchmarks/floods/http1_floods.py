"""Floods of the HTTP/1.1 port by strangers without a key."""

from __future__ import annotations

import gzip
import itertools
from collections.abc import Callable, Iterator

from floods.flood import Flood

_BATCH = 500
_MB = 1 << 20
_END = b"\r\n"
_BODY = b'{"model": "mock", "prompt": "hello", "max_tokens": 4}'


def _get(path: bytes, *headers: bytes) -> bytes:
    return b"".join((b"GET %b HTTP/1.1\r\nhost: localhost\r\n" % path, *(header + _END for header in headers), _END))


def _post(*headers: bytes) -> bytes:
    start = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer wrong\r\n"
    return b"".join((start, *(header + _END for header in headers), _END))


def _length(size: int) -> bytes:
    return b"content-length: %d" % size


_HEALTH = _get(b"/health")
_CHUNKED = _post(b"transfer-encoding: chunked")
_ASKS = b"OPTIONS /v1/completions HTTP/1.1\r\nhost: localhost\r\norigin: http://a\r\naccess-control-request-method: POST\r\n\r\n"
_PACKED = gzip.compress(bytes(15 * _MB))
_BOMB = b"%x\r\n%b\r\n0\r\n\r\n" % (len(_PACKED), _PACKED)
"""A body in chunks: 15 KB that would become 15 MB."""


def _same(request: bytes) -> Callable[[int], Iterator[bytes]]:
    """The same again and again."""
    batch = request * max(1, min(_BATCH, 256 * 1024 // len(request)))
    return lambda _: itertools.repeat(batch)


def _after(first: bytes, then: bytes) -> Callable[[int], Iterator[bytes]]:
    """Something, and then the same again and again."""
    return lambda _: itertools.chain((first,), itertools.repeat(then))


HTTP1_FLOODS = (
    Flood("GET /health", "http", _same(_HEALTH)),
    Flood("GET /health with answers unread", "http", _same(_HEALTH), reads=False),
    Flood("GET /health on new connections", "http", lambda _: iter((_HEALTH,)), hang_up=0.0),
    Flood("GET /metrics", "http", _same(_get(b"/metrics"))),
    Flood("GET /metrics with answers unread", "http", _same(_get(b"/metrics")), reads=False),
    Flood("unknown paths", "http", _same(_get(b"/a"))),
    Flood("HEAD /health", "http", _same(_HEALTH.replace(b"GET", b"HEAD"))),
    Flood(
        "requests to upgrade", "http", _same(_get(b"/health", b"connection: upgrade, http2-settings", b"upgrade: h2c"))
    ),
    Flood("bodies that wait for 100", "http", _same(_post(_length(9), b"expect: 100-continue") + b"{} {} {} ")),
    Flood("models without a key", "http", _same(_get(b"/v1/models"))),
    Flood("questions of browsers", "http", _same(_ASKS)),
    Flood("heads of 60 KB", "http", _same(_get(b"/health", b"a: " + b"a" * 60_000))),
    Flood("heads of 120 fields", "http", _same(_get(b"/health", *(b"a%d: b" % number for number in range(120))))),
    Flood("heads without an end", "http", _same(b"GET /" + b"a" * 300_000)),
    Flood("heads a byte at a time", "http", lambda _: (b"%c" % byte for byte in itertools.cycle(b"GET /health"))),
    Flood("empty lines", "http", _same(_END)),
    Flood("malformed requests", "http", _same(_get(b"/health", b"a : b"))),
    Flood("malformed requests on new connections", "http", lambda _: iter((_get(b"/health", b"a : b"),)), hang_up=0.0),
    Flood("requests with a wrong key", "http", _same(_post(_length(len(_BODY))) + _BODY)),
    Flood("large bodies with a wrong key", "http", _same(_post(_length(15 * _MB)) + bytes(15 * _MB))),
    Flood("half bodies with a wrong key", "http", lambda _: iter((_post(_length(15 * _MB)), bytes(14 * _MB)))),
    Flood("bodies nobody asks for", "http", _same(_get(b"/health", _length(60_000)) + bytes(60_000))),
    Flood("chunks of a byte", "http", _after(_CHUNKED, b"1\r\na\r\n" * 10_000)),
    Flood("chunks with long extensions", "http", _after(_CHUNKED + b"1;", b"a" * 100_000)),
    Flood("trailers without an end", "http", _after(_CHUNKED + b"1\r\na\r\n0\r\n", b"a: b\r\n" * 10_000)),
    Flood("gzip in chunks", "http", _same(_post(b"transfer-encoding: chunked", b"content-encoding: gzip") + _BOMB)),
    Flood("after the last answer", "http", _after(_get(b"/health", b"connection: close"), bytes(256 * 1024))),
    Flood("HTTP/2 on the wrong port", "http", _same(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9))),
    Flood("HTTP connections that say nothing", "http", lambda _: iter(()), hang_up=0.0),
)
