"""Pictures by URL: only what is allowed is asked, what was checked is what is connected to, and bounds hold."""

from __future__ import annotations

import asyncio
import base64
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trustme

from sapwood_common.errors import InvalidArgumentError
from sapwood_tokenizer.pictures.fetching import Fetcher

HOST = "localhost"
Answer = Callable[[str], Awaitable[bytes]]


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def reply(body: bytes, status: str = "200 OK", **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


@asynccontextmanager
async def host(answer: Answer, tls: trustme.CA) -> AsyncIterator[tuple[int, list[str]]]:
    """A host with a certificate for HOST; yields its port and the requests that come."""
    seen: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = (await reader.readuntil(b"\r\n\r\n")).decode()
        seen.append(request)
        writer.write(await answer(request.split(" ")[1]))
        await writer.drain()
        writer.close()

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.issue_cert(HOST).configure_cert(context)
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1], seen


def fetcher(
    port: int, tls: trustme.CA, addresses: Sequence[str] = ("127.0.0.1",), **more: Any
) -> tuple[Fetcher, list[str]]:
    """A fetcher that may ask HOST at a loopback address; and the names that it resolves."""
    resolved: list[str] = []

    async def resolve(name: str, _: int) -> Sequence[str]:
        resolved.append(name)
        return addresses

    options = {"public": lambda address: address == "127.0.0.1", **more}
    trust = ssl.create_default_context(cadata=tls.cert_pem.bytes().decode())
    return Fetcher([HOST, "other"], 1000, 2.0, resolve=resolve, port=port, trust=trust, **options), resolved


async def refused(made: Fetcher, url: str) -> str:
    with pytest.raises(InvalidArgumentError) as caught:
        await made.fetch(url, "messages[0].items[0]")
    assert caught.value.field == "messages[0].items[0]"
    return caught.value.message


async def test_a_host_of_the_list_is_asked_at_its_one_resolved_address_and_by_its_name(authority: trustme.CA) -> None:
    async def answer(path: str) -> bytes:
        return reply(path.encode())

    async with host(answer, authority) as (port, seen):
        made, resolved = fetcher(port, authority)
        assert await made.fetch(f"https://{HOST}:{port}/a/b?c=d", "x") == b"/a/b?c=d"
        assert resolved == [HOST], "resolved once: there is no second answer that could be another one"
        assert f"Host: {HOST}\r\n" in seen[0]
        assert "cookie" not in seen[0].lower()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 900 + b"0\r\n\r\n",
        b"HTTP/1.1 103 Early Hints\r\na: b\r\n\r\n" * 900 + reply(b"a" * 900),
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 900 + b"Content-Length: 900\r\n\r\n" + b"a" * 900,
    ],
    ids=["chunks of a byte", "heads before the head", "many headers"],
)
async def test_hosts_are_asked_beside_the_services_own_loop_whatever_they_answer(
    authority: trustme.CA, answer: bytes
) -> None:
    """The loop stood still for 0.85 s in a file in chunks of a byte, and for 0.17 s again and again in heads before the head."""
    asked_in, held_in, held = set(), set(), 0

    async def resolve(_: str, __: int) -> Sequence[str]:
        asked_in.add(threading.get_ident())
        return ["127.0.0.1"]

    def hold(size: int) -> None:
        nonlocal held
        held += size
        held_in.add(threading.get_ident())

    async def answered(_: str) -> bytes:
        return answer

    async with host(answered, authority) as (port, _):
        trust = ssl.create_default_context(cadata=authority.cert_pem.bytes().decode())
        made = Fetcher([HOST], 1000, 30.0, resolve=resolve, public=lambda _: True, port=port, trust=trust)
        assert await made.fetch(f"https://{HOST}:{port}/a", "x", hold) == b"a" * 900
    assert held == 900
    assert held_in == {threading.get_ident()}
    assert not asked_in & held_in


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://localhost/a", "http: data: and https: are taken"),
        ("file:///etc/passwd", "file: data: and https: are taken"),
        ("ftp://localhost/a", "ftp"),
        ("gopher://localhost/a", "gopher"),
        ("//localhost/a", "no scheme"),
        ("https://elsewhere/a", "not among those that may be asked"),
        ("https://localhost.evil/a", "not among"),
        ("https://evil#localhost/a", "not among"),
        ("https://evil?localhost/a", "not among"),
        ("https://localhost@evil/a", "user or another port"),
        ("https://evil@localhost/a", "user or another port"),
        ("https://evil\\@localhost/a", "characters that URLs have not"),
        ("https://localhost\\.evil/a", "characters that URLs have not"),
        ("https://localhost\t/a", "characters that URLs have not"),
        ("https://localhost /a", "characters that URLs have not"),
        ("https://localhost/a\r\nX: y", "characters that URLs have not"),
        ("https://loc\u0430lhost/a", "characters that URLs have not"),
        ("https://127.0.0.1/a", "not among"),
        ("https://2130706433/a", "not among"),
        ("https://0x7f.1/a", "not among"),
        ("https://[::1]/a", "not among"),
        ("https://[::ffff:127.0.0.1]/a", "not among"),
        ("https://localhost:22/a", "user or another port"),
        ("https://localhost:99999/a", "it is no URL"),
        ("https://[localhost/a", "it is no URL"),
        ("https://localhost/" + "a" * 9000, "the most are 8192"),
    ],
)
async def test_urls_that_lead_elsewhere_are_refused_unasked(url: str, says: str, authority: trustme.CA) -> None:
    made, resolved = fetcher(443, authority)
    assert says in await refused(made, url)
    assert not resolved


async def test_without_hosts_only_data_is_taken() -> None:
    made = Fetcher()
    assert await made.fetch("data:image/png;base64," + base64.b64encode(b"abc").decode(), "x") == b"abc"
    assert await made.fetch("DATA:,a%20b", "x") == b"a b"
    assert "names no host" in await refused(made, "https://localhost/a")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("data:image/png;base64", "has a comma"),
        ("data:;base64,a", "base64 is not"),
        ("data:;base64,YWJj\nYWJj", "base64 is not"),
        ("data:;base64," + "A" * 2000, "the most are 1000"),
        ("data:," + "a" * 5000, "longer than a picture may be"),
    ],
)
async def test_data_that_is_none_or_too_much_is_refused(url: str, says: str) -> None:
    assert says in await refused(Fetcher(max_bytes=1000), url)


async def test_data_of_many_escapes_must_be_base64() -> None:
    fetched = Fetcher(max_bytes=1 << 20)
    assert await fetched.fetch("data:," + "%41" * 1000, "x") == b"A" * 1000
    assert "must be base64" in await refused(fetched, "data:," + "%41" * 100_000)


@pytest.mark.parametrize("addresses", [["10.0.0.1"], ["127.0.0.1", "169.254.169.254"], []])
async def test_a_host_with_any_address_that_is_not_public_is_not_asked(
    addresses: list[str], authority: trustme.CA
) -> None:
    made, _ = fetcher(443, authority, addresses)
    assert "not public" in await refused(made, f"https://{HOST}/a")


async def test_a_redirect_is_looked_at_like_the_first_url(authority: trustme.CA) -> None:
    places = {
        "/good": "/there", "/there": "", "/evil": "https://evil/a", "/plain": "http://localhost/a",
        "/meta": "https://169.254.169.254/a", "/file": "file:///etc/passwd", "/loop": "/loop",
    }  # fmt: skip

    async def answer(path: str) -> bytes:
        to = places[path]
        return reply(b"", "302 Found", Location=to) if to else reply(b"picture")

    async with host(answer, authority) as (port, seen):
        made, resolved = fetcher(port, authority)
        base = f"https://{HOST}:{port}"
        assert await made.fetch(f"{base}/good", "x") == b"picture"
        assert resolved == [HOST, HOST], "each step is resolved and checked"
        assert "not among" in await refused(made, f"{base}/evil")
        assert "http: data:" in await refused(made, f"{base}/plain")
        assert "not among" in await refused(made, f"{base}/meta")
        assert "file: data:" in await refused(made, f"{base}/file")
        seen.clear()
        assert "more than 3 redirects" in await refused(made, f"{base}/loop")
        assert len(seen) == 4


async def test_a_peer_that_sends_too_much_too_slowly_or_compressed_is_given_up(authority: trustme.CA) -> None:
    async def answer(path: str) -> bytes:
        if path == "/slow":
            await asyncio.sleep(20)
        if path == "/packed":
            return reply(b"x" * 10, Content_Encoding="gzip")
        return reply(b"", "404 Not Found") if path == "/none" else reply(b"x" * 1001)

    async with host(answer, authority) as (port, _):
        made, _ = fetcher(port, authority)
        base = f"https://{HOST}:{port}"
        assert "more than 1000 bytes" in await refused(made, f"{base}/large")
        assert "compresses it" in await refused(made, f"{base}/packed")
        assert "status 404" in await refused(made, f"{base}/none")
        assert "did not come within 2 s" in await refused(made, f"{base}/slow")


async def test_a_certificate_for_another_name_is_not_believed(authority: trustme.CA) -> None:
    async def answer(path: str) -> bytes:
        return reply(b"picture")

    async with host(answer, authority) as (port, seen):
        made, _ = fetcher(port, authority)
        assert "CERTIFICATE" in (await refused(made, f"https://other:{port}/a")).upper()
        assert not seen
