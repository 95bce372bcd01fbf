"""The page's files: what the folder ``static`` holds, each at its own path and nothing else at any."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.edges.http1.errors import HttpError

BARE, FOLDER = "/ui", "/ui/"
_STATIC = Path(__file__).with_name("static")
_INDEX = "index.html"
_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; base-uri 'none'; "
    b"form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Nothing from elsewhere, nothing inline, and no way to make markup or code of text."""
_SAFE = (
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


@dataclass(frozen=True, slots=True)
class _File:
    kind: bytes
    body: bytes
    etag: bytes

    async def show(self, exchange: Exchange) -> None:
        """Sends the file, or says that the browser has it already."""
        known = exchange.headers.get(b"if-none-match", b"")
        headers = ((b"etag", self.etag), (b"cache-control", b"no-cache"), *_SAFE)
        if known.strip() == b"*" or self.etag in (tag.strip().removeprefix(b"W/") for tag in known.split(b",")):
            await exchange.send_page(304, headers, b"")
        else:
            await exchange.send_page(200, ((b"content-type", self.kind), *headers), self.body)


class Files:
    """Sends the page's files."""

    def __init__(self) -> None:
        self._files: dict[str, _File] = {}
        for file in sorted(_STATIC.iterdir()):
            if kind := _TYPES.get(file.suffix):
                body = file.read_bytes()
                etag = b'"%b"' % hashlib.sha256(body).hexdigest()[:32].encode()
                self._files[FOLDER + ("" if file.name == _INDEX else file.name)] = _File(kind, body, etag)

    async def show(self, exchange: Exchange) -> None:
        """Sends the file of a path.

        Raises:
            HttpError: There is none: 404.
        """
        file = self._files.get(exchange.path)
        if file is None:
            raise HttpError(404, f"there is no {exchange.path}")
        await file.show(exchange)


async def lead_to_folder(exchange: Exchange) -> None:
    """Redirects to the page from ``/`` and ``/ui``: relatively, so that it also holds behind a proxy that adds a path."""
    await exchange.send_page(308, ((b"location", b"ui/"), (b"cache-control", b"no-cache"), *_SAFE), b"")
