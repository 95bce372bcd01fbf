"""Requests that another server might read otherwise, or not at all: refused, and the connection closed."""

from __future__ import annotations

import asyncio

import pytest

from sapwood_router.edges.http1.errors import HttpError
from sapwood_router.edges.http1.head import MOST_HEADERS, HeadReader

HOST = b"Host: a\r\n"
GET, POST = b"GET / HTTP/1.1\r\n" + HOST, b"POST / HTTP/1.1\r\n" + HOST
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"

HEADS: dict[str, tuple[bytes, int]] = {
    # lines
    "a line of HTTP/0.9": (b"GET /\r\n", 400),
    "HTTP/0.9 by name": (b"GET / HTTP/0.9\r\n" + HOST, 505),
    "HTTP/1.2": (b"GET / HTTP/1.2\r\n" + HOST, 505),
    "HTTP/2.0": (b"GET / HTTP/2.0\r\n" + HOST, 505),
    "HTTP/2's preface": (b"PRI * HTTP/2.0\r\n", 505),
    "HTTP/3.0": (b"GET / HTTP/3.0\r\n" + HOST, 505),
    "a version of three digits": (b"GET / HTTP/1.10\r\n" + HOST, 505),
    "a version in small letters": (b"GET / http/1.1\r\n" + HOST, 400),
    "another protocol": (b"DESCRIBE / RTSP/1.0\r\n" + HOST, 400),
    "no version": (b"GET / \r\n" + HOST, 400),
    "no path": (b"GET HTTP/1.1\r\n" + HOST, 400),
    "two spaces": (b"GET  / HTTP/1.1\r\n" + HOST, 400),
    "a tab": (b"GET\t/ HTTP/1.1\r\n" + HOST, 400),
    "a space at the end": (b"GET / HTTP/1.1 \r\n" + HOST, 400),
    "a space before": (b" GET / HTTP/1.1\r\n" + HOST, 400),
    "a control character in the path": (b"GET /\x01 HTTP/1.1\r\n" + HOST, 400),
    "NUL in the path": (b"GET /\x00 HTTP/1.1\r\n" + HOST, 400),
    "a byte beyond ASCII in the path": (b"GET /\xff HTTP/1.1\r\n" + HOST, 400),
    "a fragment": (b"GET /a#b HTTP/1.1\r\n" + HOST, 400),
    "a path without its slash": (b"GET a HTTP/1.1\r\n" + HOST, 400),
    "a method in small letters": (b"get / HTTP/1.1\r\n" + HOST, 400),
    "a method nobody knows": (b"FOO / HTTP/1.1\r\n" + HOST, 400),
    "a method of another protocol": (b"MKCOL / HTTP/1.1\r\n" + HOST, 501),
    "CONNECT": (b"CONNECT a:80 HTTP/1.1\r\n" + HOST, 501),
    "only LF at the line's end": (b"GET / HTTP/1.1\nHost: a\r\n", 400),
    "TLS where none is spoken": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n", 400),
    "more empty lines than one": (b"\r\n\r\n" + GET, 400),
    # host
    "no host": (b"GET / HTTP/1.1\r\n", 400),
    "two hosts": (GET + b"host: b\r\n", 400),
    "a host with a space": (b"GET / HTTP/1.1\r\nHost: a b\r\n", 400),
    "a host with a path": (b"GET / HTTP/1.1\r\nHost: a/b\r\n", 400),
    "a host with a user": (b"GET / HTTP/1.1\r\nHost: a@b\r\n", 400),
    "a list of hosts": (b"GET / HTTP/1.1\r\nHost: a,b\r\n", 400),
    # fields
    "a space before the colon": (GET + b"A : b\r\n", 400),
    "a tab before the colon": (GET + b"A\t: b\r\n", 400),
    "transfer-encoding with a space": (POST + b"Transfer-Encoding : chunked\r\n", 400),
    "no colon": (GET + b"A\r\n", 400),
    "no name": (GET + b": b\r\n", 400),
    "a space in a name": (GET + b"A b: c\r\n", 400),
    "a bracket in a name": (GET + b"A(: c\r\n", 400),
    "a byte beyond ASCII in a name": (GET + b"\xc3: c\r\n", 400),
    "NUL in a name": (GET + b"A\x00: c\r\n", 400),
    "a first header that is indented": (b"GET / HTTP/1.1\r\n A: b\r\n" + HOST, 400),
    "a value over two lines": (GET + b"A: b\r\n c\r\n", 400),
    "a value over two lines, with a tab": (GET + b"A: b\r\n\tc\r\n", 400),
    "a bare CR in a value": (GET + b"A: b\rc\r\n", 400),
    "a bare LF in a value": (GET + b"A: b\nc: d\r\n", 400),
    "NUL in a value": (GET + b"A: b\x00c\r\n", 400),
    "a control character in a value": (GET + b"A: b\x01c\r\n", 400),
    "DEL in a value": (GET + b"A: b\x7fc\r\n", 400),
    "two keys": (GET + b"Authorization: Bearer a\r\nauthorization: Bearer b\r\n", 400),
    "two content types": (POST + b"Content-Type: a/b\r\nContent-Type: c/d\r\n", 400),
    "two origins": (GET + b"Origin: http://a\r\nOrigin: http://b\r\n", 400),
    "too many headers": (GET + b"a: b\r\n" * MOST_HEADERS, 431),
    # lengths
    "two lengths": (POST + b"Content-Length: 5\r\nContent-Length: 6\r\n", 400),
    "one length twice": (POST + b"Content-Length: 5\r\nContent-Length: 5\r\n", 400),
    "a list of lengths": (POST + b"Content-Length: 5, 5\r\n", 400),
    "a length with a sign": (POST + b"Content-Length: +5\r\n", 400),
    "a length below 0": (POST + b"Content-Length: -5\r\n", 400),
    "a length in hexadecimal": (POST + b"Content-Length: 0x5\r\n", 400),
    "a length with a line": (POST + b"Content-Length: 1_0\r\n", 400),
    "a length in two": (POST + b"Content-Length: 5 5\r\n", 400),
    "an empty length": (POST + b"Content-Length: \r\n", 400),
    "a length beyond 64 bits": (POST + b"Content-Length: 18446744073709551621\r\n", 400),
    "a length and chunks": (POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", 400),
    "chunks and a length": (POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n", 400),
    "another coding": (POST + b"Transfer-Encoding: gzip, chunked\r\n", 400),
    "chunks, and then another coding": (POST + b"Transfer-Encoding: chunked, gzip\r\n", 400),
    "chunks twice": (POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", 400),
    "no coding": (POST + b"Transfer-Encoding: identity\r\n", 400),
    "nearly chunks": (POST + b"Transfer-Encoding: xchunked\r\n", 400),
    "chunks behind a control character": (POST + b"Transfer-Encoding: \x0bchunked\r\n", 400),
    "chunks in HTTP/1.0": (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n", 400),
    "another expectation": (POST + b"Expect: wonders\r\n", 417),
}

BODIES: dict[str, bytes] = {
    "a size with a sign": b"+5\r\nhello\r\n0\r\n\r\n",
    "a size with 0x": b"0x5\r\nhello\r\n0\r\n\r\n",
    "a space before the size": b" 5\r\nhello\r\n0\r\n\r\n",
    "a space after the size": b"5 \r\nhello\r\n0\r\n\r\n",
    "no size": b"\r\nhello\r\n0\r\n\r\n",
    "a size beyond 64 bits": b"10000000000000005\r\nhello\r\n0\r\n\r\n",
    "more than its size": b"5\r\nhello!\r\n0\r\n\r\n",
    "less than its size": b"5\r\nhell\r\n0\r\n\r\n",
    "only LF after the size": b"5\nhello\r\n0\r\n\r\n",
    "only LF after a chunk": b"5\r\nhello\n0\r\n\r\n",
    "only LF after the last chunk": b"5\r\nhello\r\n0\n\n" + GET + b"\r\n",
    "only CR after the size": b"5\rhello\r\n0\r\n\r\n",
    "a bare CR in an extension": b"5;a\rb\r\nhello\r\n0\r\n\r\n",
    "a bare LF in an extension": b"5;a\nb\r\nhello\r\n0\r\n\r\n",
    "a space in a trailer's name": b"0\r\nA : b\r\n\r\n",
    "a length in a trailer": b"0\r\nContent-Length: 5\r\n\r\n",
    "a control character in a trailer": b"0\r\nA: \x01\r\n\r\n",
}


@pytest.mark.parametrize("case", HEADS)
async def test_a_head_that_may_be_read_in_two_ways_is_refused_and_nothing_after_it_is_read(serve, case) -> None:
    head, status = HEADS[case]
    async with serve() as site:
        client = await site.connect()
        client.send(head, b"\r\n", b"hello", GET, b"\r\n")
        answer = await client.answer()
        assert (answer[0], answer[1]["connection"]) == (status, "close"), answer
        assert await client.rest() == b""
        assert not site.seen


@pytest.mark.parametrize("case", BODIES)
async def test_ambiguous_chunks_are_refused_and_nothing_behind_them_is_read(serve, case) -> None:
    async def handler(request) -> None:
        try:
            await request.receive_body(1000)
        except HttpError as error:
            await request.respond(error.status, [], error.message.encode())

    async with serve(handler) as site:
        client = await site.connect()
        client.send(CHUNKED, BODIES[case], GET, b"\r\n")
        status, headers, _ = await client.answer()
        assert (status, headers["connection"]) == (400, "close")
        assert await client.rest() == b""
        assert len(site.seen) == 1


@pytest.mark.parametrize("case", ["only LF after the last chunk", "a size with 0x"])
async def test_malformed_chunks_of_a_body_nobody_asked_for_end_the_connection(serve, case) -> None:
    async def handler(request) -> None:
        await request.respond(200, [], b"hello")

    async with serve(handler) as site:
        client = await site.connect()
        client.send(CHUNKED)
        await client.answer()
        client.send(BODIES[case], GET, b"\r\n")
        assert await client.rest() == b""
        assert len(site.seen) == 1


async def test_what_is_unusual_and_clear_is_served(serve) -> None:
    heads = {
        b"GET http://b:1/x%20y?z HTTP/1.1\r\nHost: a\r\n": b"GET /x y ",
        b"GET http://b HTTP/1.1\r\nHost: a\r\n": b"GET / ",
        b"OPTIONS * HTTP/1.1\r\nHost: a\r\n": b"OPTIONS * ",
        b"GET / HTTP/1.1\r\nhOsT:\r\n": b"GET / ",
        b"GET / HTTP/1.1\r\nHost: [::1]:80\r\nA:\t\xff \t\r\nA: c\r\n": b"GET / ",
        b"\r\nDELETE //a HTTP/1.1\r\nHost: a\r\n": b"DELETE //a ",
        GET + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQ\r\n": b"GET / ",
        GET + b"Connection: upgrade\r\nUpgrade: websocket\r\n": b"GET / ",
    }
    async with serve() as site:
        client = await site.connect()
        for head in heads:
            client.send(head, b"\r\n")
        for expected in heads.values():
            assert (await client.answer())[::2] == (200, expected)
        assert site.seen[4].head.headers[1:] == [(b"a", b"\xff"), (b"a", b"c")]


async def test_extensions_and_trailers_are_skipped_and_bodies_end_where_they_end(serve) -> None:
    bodies = [
        b"5\r\nhello\r\n0\r\n\r\n",
        b'5;a=b;c="d"\r\nhello\r\n000\r\nA: b\r\nHost: evil\r\n\r\n',
        b"1\r\nh\r\n00000004\r\nello\r\n0\r\n\r\n",
        b"9\r\n\r\n\r\nhello\r\n0\r\n\r\n",
    ]
    async with serve() as site:
        for size in (1, 3, 1000):
            client = await site.connect()
            sent = b"".join(CHUNKED + body for body in bodies)
            for start in range(0, len(sent), size):
                client.send(sent[start : start + size])
                await asyncio.sleep(0)
            bodies_seen = [(await client.answer())[2].removeprefix(b"POST / ") for _ in bodies]
            assert bodies_seen == [b"hello", b"hello", b"hello", b"\r\n\r\nhello"]


def test_a_head_says_what_is_asked() -> None:
    read = HeadReader().read
    head, length = read(POST + b"Content-Length: 7 \r\nExpect: 100-Continue\r\nX-A: 1\r\nx-a: 2\r\n\r\n")
    assert (head.method, head.path, length, head.expects_continue, head.keep_alive) == ("POST", "/", 7, True, True)
    assert (head.fields[b"x-a"], len(head.headers)) == (b"2", 4)
    old, length = read(b"GET /a HTTP/1.0\r\nConnection: keep-alive\r\nExpect: 100-continue\r\n\r\n")
    assert (length, old.takes_chunks, old.keep_alive, old.expects_continue) == (0, False, True, False)
    assert not read(b"GET /a HTTP/1.0\r\n\r\n")[0].keep_alive
    assert not read(GET + b"Connection: keep-alive, close\r\n\r\n")[0].keep_alive
    assert read(CHUNKED)[1] is None


def test_a_head_that_comes_again_is_read_once_and_its_length_each_time() -> None:
    reader = HeadReader()
    heads = [reader.read(POST + b"content-length: %d\r\nx-a: 1\r\n\r\n" % size) for size in (7, 12345, 7)]
    assert [length for _, length in heads] == [7, 12345, 7]
    assert heads[0][0] is heads[1][0] is heads[2][0]
    other, length = reader.read(POST + b"content-length: 7\r\nx-a: 2\r\n\r\n")
    assert (other.fields[b"x-a"], length) == (b"2", 7)
    assert reader.read(POST + b"content-length:7\r\n\r\n")[1] == reader.read(POST + b"content-length:7\r\n\r\n")[1] == 7
    for again in range(2):
        with pytest.raises(HttpError):
            reader.read(POST + b"content-length: 7\r\ncontent-length: 7\r\n\r\n")
        with pytest.raises(HttpError):
            reader.read(POST + b"content-length: 7\r\ntransfer-encoding: gzip\r\n\r\n")
        assert reader.read(CHUNKED)[1] is None, again
    for number in range(1000):
        assert reader.read(GET + b"x-a: %d\r\n\r\n" % number)[0].fields[b"x-a"] == b"%d" % number
