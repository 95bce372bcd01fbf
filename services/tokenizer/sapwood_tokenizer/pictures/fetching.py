"""Gets pictures and videos that requests name by URL, without letting a request reach what only this host can.

Rules. Without hosts in the allow-list only ``data:`` is taken; ``file:`` and ``http:`` never are. A URL is parsed once, and what
is checked is what is connected to: its host has to be one of the list, letter by letter; the host is resolved once, every address
that it has must be public, and the connection goes to such an address, with the host's name for TLS. A redirect is a URL like the
first. Bytes, time and redirects have bounds; what the peer sends beyond is not read. Hosts are asked on an event loop of a thread
of its own: one that answers in chunks of a byte, or with heads without end, would keep the service's loop for most of a second.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import unquote_to_bytes, urljoin, urlsplit

import httpx2

from sapwood_common.errors import InvalidArgumentError
from sapwood_common.public_address import is_public

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]

_MOST_REDIRECTS = 3
_LONGEST_URL = 8192
_MOST_ESCAPES = 65_536
"""``%`` in a ``data:`` URL that is not base64: each costs as much as a thousand other characters."""
_PORT = 443
_REDIRECTS = (301, 302, 303, 307, 308)
_HELD_AT_ONCE = 64 * 1024
"""Bytes of an answer that are counted together."""

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Target:
    """A parsed URL.

    Attributes:
        host: In lower case.
        path: Path and query, as they are sent.
    """

    host: str
    path: str


class Fetcher:
    """Gets files.

    Args:
        hosts: Those that may be asked over https; empty: none.
        max_bytes: The largest file.
        seconds: How long a file may take, with all redirects.
        resolve: Returns the addresses of a host; replaced by tests.
        public: Tells whether an address may be asked; replaced by tests.
        port: Of the hosts; replaced by tests.
        trust: The certificates that are trusted; None: the system's.
    """

    def __init__(
        self,
        hosts: Collection[str] = (),
        max_bytes: int = 20 << 20,
        seconds: float = 10.0,
        *,
        resolve: Resolve | None = None,
        public: Callable[[str], bool] | None = None,
        port: int = _PORT,
        trust: ssl.SSLContext | None = None,
    ) -> None:
        self._hosts = frozenset(host.lower() for host in hosts)
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._resolve = resolve or _resolve
        self._public = public or is_public
        self._port = port
        self._trust = trust
        self._loop: asyncio.AbstractEventLoop | None = None

    async def fetch(self, url: str, field: str, hold: Callable[[int], None] = lambda _: None) -> bytes:
        """The file.

        Args:
            url: Where it is.
            field: What errors name.
            hold: Is called with numbers of bytes of a host's file, as they come; what it raises ends the fetch.

        Raises:
            InvalidArgumentError: It may not be asked for, or does not come; names ``field`` and says why.
        """
        try:
            if url[:5].lower() == "data:":
                return self._decoded(url)
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="pictures' hosts", daemon=True).start()
            own = asyncio.get_running_loop()
            async with asyncio.timeout(self._seconds):
                return await _on(self._loop, self._over_https(url, lambda size: _on(own, _called(hold, size))))
        except TimeoutError:
            raise InvalidArgumentError(f"the picture did not come within {self._seconds:.3g} s", field=field) from None
        except (_RefusedError, httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
            raise InvalidArgumentError(f"the picture cannot be fetched: {error}", field=field) from None

    def _decoded(self, url: str) -> bytes:
        head, comma, body = url[5:].partition(",")
        if not comma:
            raise _RefusedError("a data: URL has a comma before the data")
        if len(body) > 4 * self._max_bytes:
            raise _RefusedError(f"it is longer than a picture may be, {self._max_bytes} bytes")
        if not head.lower().endswith(";base64"):
            if body.count("%") > _MOST_ESCAPES:
                raise _RefusedError("a data: URL with so many % must be base64")
            content = unquote_to_bytes(body)
        else:
            try:
                content = base64.b64decode(body, validate=True)
            except (binascii.Error, ValueError):
                raise _RefusedError("what is called base64 is not") from None
        if len(content) > self._max_bytes:
            raise _RefusedError(f"{len(content)} bytes: the most are {self._max_bytes}")
        return content

    async def _over_https(self, url: str, hold: Callable[[int], Awaitable[None]]) -> bytes:
        for _ in range(_MOST_REDIRECTS + 1):
            target = self._parsed(url)
            status, location, content = await self._asked(target, hold)
            if status in _REDIRECTS:
                url = urljoin(f"https://{target.host}{target.path}", location)
            elif status == 200:
                return content
            else:
                raise _RefusedError(f"the host answered with status {status}")
        raise _RefusedError(f"more than {_MOST_REDIRECTS} redirects")

    def _parsed(self, url: str) -> Target:
        if len(url) > _LONGEST_URL:
            raise _RefusedError(f"the URL has {len(url)} characters; the most are {_LONGEST_URL}")
        if not url.isascii() or "\\" in url or any(letter <= " " or letter == "\x7f" for letter in url):
            raise _RefusedError("the URL has characters that URLs have not; write them with %")
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port
        except ValueError as error:
            raise _RefusedError(f"it is no URL: {error}") from None
        if parts.scheme != "https":
            raise _RefusedError(f"{parts.scheme or 'no scheme'}: data: and https: are taken")
        if not self._hosts:
            raise _RefusedError("only data: URLs are taken here: --pictures hosts names no host")
        if "@" in parts.netloc or port not in (None, self._port):
            raise _RefusedError("a URL with a user or another port is not taken")
        if host not in self._hosts:
            raise _RefusedError("its host is not among those that may be asked (--pictures hosts)")
        return Target(host, (parts.path or "/") + (f"?{parts.query}" if parts.query else ""))

    async def _asked(self, target: Target, hold: Callable[[int], Awaitable[None]]) -> tuple[int, str, bytes]:
        """Status, place of a redirect, and content."""
        addresses = await self._resolve(target.host, self._port)
        if not addresses or not all(map(self._public, addresses)):
            raise _RefusedError("its host has an address that is not public, or none")
        address = f"[{addresses[0]}]" if ":" in addresses[0] else addresses[0]
        if self._trust is None:  # once: it reads all of the system's certificates
            self._trust = ssl.create_default_context()
        async with (
            httpx2.AsyncClient(
                verify=self._trust, trust_env=False, follow_redirects=False, timeout=self._seconds
            ) as client,
            client.stream(
                "GET",
                f"https://{address}:{self._port}{target.path}",
                headers={"Host": target.host, "Accept": "image/*, video/*", "Accept-Encoding": "identity"},
                extensions={"sni_hostname": target.host},
            ) as response,
        ):
            if response.status_code != 200:
                return response.status_code, response.headers.get("location", ""), b""
            if response.headers.get("content-encoding", "identity") != "identity":
                raise _RefusedError("the host compresses it, though it was asked not to")
            content, held = bytearray(), 0
            async for part in response.aiter_raw():
                if len(content) + len(part) > self._max_bytes:
                    raise _RefusedError(f"it has more than {self._max_bytes} bytes")
                content += part
                if len(content) - held >= _HELD_AT_ONCE:
                    await hold(len(content) - held)
                    held = len(content)
            await hold(len(content) - held)
            return 200, "", bytes(content)


class _RefusedError(Exception):
    """A URL is not followed; says why."""


async def _on(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """The result of work on another loop, which ends if this is cancelled."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))


async def _called(hold: Callable[[int], None], size: int) -> None:
    hold(size)


async def _resolve(host: str, port: int) -> Sequence[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]
