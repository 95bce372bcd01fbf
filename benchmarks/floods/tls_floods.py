"""Floods of TLS itself, on a port that speaks it."""

from __future__ import annotations

import contextlib
import itertools
import ssl
from collections.abc import Iterator

from floods.flood import Flood
from floods.wire import GREETING, HEALTH, call, call_block, client_tls, streams

from sapwood_net.http2.wire import frames

_PINGS = frames.frame(frames.PING, 0, 0, bytes(8)) * 20
_GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


def _hello(alpn: str | None) -> bytes:
    """How a client begins a handshake. It may be sent any number of times: the server has to answer with a signature."""
    outgoing = ssl.MemoryBIO()
    connection = client_tls(alpn).wrap_bio(ssl.MemoryBIO(), outgoing)
    with contextlib.suppress(ssl.SSLWantReadError):
        connection.do_handshake()
    return outgoing.read()


def _small_calls(_: int) -> Iterator[bytes]:
    yield GREETING
    block = call_block(HEALTH)
    for stream in streams():
        yield call(stream, block, b"")


_HELLO, _HELLO_H2 = _hello(None), _hello("h2")

TLS_FLOODS = (
    Flood("changes of keys", "grpc", lambda _: iter(()), tls=True, changes_keys=True),
    Flood(
        "TLS records of a byte",
        "grpc",
        lambda _: itertools.chain((GREETING,), itertools.repeat(_PINGS)),
        tls=True,
        piece=1,
    ),
    Flood("TLS records of a byte over HTTP", "http", lambda _: itertools.repeat(_GET * 10), tls=True, piece=1),
    Flood("TLS records of 20 bytes", "grpc", _small_calls, tls=True, piece=20),
    Flood("half handshakes", "grpc", lambda _: iter((_HELLO_H2,)), tls=True, raw=True, hang_up=0.0),
    Flood("half handshakes over HTTP", "http", lambda _: iter((_HELLO,)), tls=True, raw=True, hang_up=0.0),
    Flood("half handshakes that stay", "grpc", lambda _: iter((_HELLO_H2,)), tls=True, raw=True, times=100),
    Flood(
        "no handshakes at all",
        "grpc",
        lambda _: itertools.repeat(b"\x16\x03\x01\x00\x05nonsense" * 100),
        tls=True,
        raw=True,
    ),
)
