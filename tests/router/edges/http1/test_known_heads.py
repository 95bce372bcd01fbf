"""Heads of HTTP/1 requests: read the same whether or not one like it came before, and framed as h11 frames them."""

from __future__ import annotations

import random

import h11
import pytest

from sapwood_router.edges.http1.errors import HttpError
from sapwood_router.edges.http1.head import HeadReader

_LINES = (
    b"GET / HTTP/1.1",
    b"POST /v1/completions HTTP/1.1",
    b"POST / HTTP/1.0",
    b"GET /a%20b HTTP/1.1",
    b"PUT * HTTP/1.1",
)
_NAMES = (
    b"Content-Length",
    b"content-length",
    b"CONTENT-LENGTH",
    b"Transfer-Encoding",
    b"transfer-encoding",
    b"Connection",
    b"X-A",
)
_LENGTHS = (
    *(
        b"",
        b"5",
        b"05",
        b"7",
        b"5 ",
        b"\t5",
        b"+5",
        b"-5",
        b"5,5",
        b"5, 5",
        b"0x5",
        b"5\x0b",
        b"\x0b5",
        b"0",
        b"5 5",
        b"5;",
    ),
    *(b"9" * 15, b"9" * 16, b"9" * 20, b"0" * 30 + b"5", b"0" * 5000, "\u0665".encode()),
)
_CODINGS = (
    *(b"chunked", b"", b"Chunked", b"chunked ", b"\tchunked", b"\x0bchunked", b"chunked\x0b", b"chunked, chunked"),
    *(b"gzip, chunked", b"chunked, identity", b"identity", b'"chunked"', b"chunked;a", b"xchunked", b"chunked\x00"),
)
_OTHERS = (b"", b"1", b"close", b"keep-alive", b"upgrade", b"a\tb", b"Content-Length: 5")
_MOSTLY = 12


def _header(rng: random.Random) -> bytes:
    name = rng.choice(_NAMES)
    values = _LENGTHS if name.lower() == b"content-length" else _CODINGS if name[0] in b"tT" else _OTHERS
    separator = rng.choice([b": "] * _MOSTLY + [b":", b":  ", b" : ", b":\t", b" :"])
    return name + separator + rng.choice(values) + rng.choice([b"\r\n"] * _MOSTLY + [b"\n", b"\r\n ", b"\r\n\t", b"\r"])


def _heads(count: int) -> list[bytes]:
    """Heads of whole requests, many of them alike."""
    rng = random.Random(7)
    heads: list[bytes] = []
    while len(heads) < count:
        host = rng.choice([b"Host: a\r\n"] * _MOSTLY + [b"", b"Host: a\r\nhost: b\r\n"])
        fields = b"".join(_header(rng) for _ in range(rng.randrange(4)))
        head = rng.choice(_LINES) + b"\r\n" + host + fields + b"\r\n"
        if head.find(b"\r\n\r\n") == len(head) - 4:
            heads.append(head)
    return heads


def _read(reader: HeadReader, data: bytes) -> object:
    try:
        head, length = reader.read(data)
    except HttpError as error:
        return error.status, error.message
    return head.method, head.path, list(head.headers), head.fields, head.keep_alive, head.takes_chunks, length


def _framing(data: bytes) -> object:
    """The length of the body as h11 sees it, None if it comes in chunks; the error if it sees no request."""
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(data)
    try:
        request = connection.next_event()
    except h11.RemoteProtocolError as error:
        return error
    assert isinstance(request, h11.Request), request
    fields = dict(request.headers)
    return None if b"transfer-encoding" in fields else int(fields.get(b"content-length", 0))


@pytest.mark.parametrize("written", [b"Content-Length: \r\n", b"content-length:\r\n", b"Content-Length:  \r\n"])
def test_an_empty_length_is_refused_after_a_head_that_was_alike(written: bytes) -> None:
    before = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n%b\r\n"
    warm = HeadReader()
    for length in (b"9", b"0"):
        assert warm.read(before % written.replace(b"\r", length + b"\r"))[1] == int(length)
    with pytest.raises(HttpError) as caught:
        warm.read(before % written)
    assert caught.value.status == 400


def test_a_head_is_read_alike_by_a_cold_and_a_warm_cache_and_framed_as_h11_frames_it() -> None:
    warm, taken, disputed = HeadReader(), 0, []
    for data in _heads(6000):
        found = _read(HeadReader(), data)
        assert _read(warm, data) == found, data
        assert _read(warm, data) == found, data
        if isinstance(found, tuple) and len(found) > 2:
            taken += 1
            if _framing(data) != found[-1]:
                disputed.append((data, found[-1], _framing(data)))
    assert taken > 1000
    assert not disputed
