"""``/openapi.json`` and ``/docs``, made when somebody first asks for one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.edges.http.status_page import HEADERS
from sapwood_router.edges.openapi.document import openapi_document
from sapwood_router.edges.openapi.page import render
from sapwood_router.edges.routes import Ask, Route


class ApiPages:
    """Tells of routes.

    Args:
        told: The routes.
    """

    def __init__(self, told: Sequence[Route]) -> None:
        self._told = told
        self._made: asyncio.Task[tuple[bytes, bytes]] | None = None

    def routes(self) -> list[Route]:
        """The document and the page for people."""
        return [Ask("/openapi.json", self._show_document, public=True), Ask("/docs", self._show_page, public=True)]

    async def _show_document(self, exchange: Exchange) -> None:
        document, _ = await self._pages()
        await exchange.send_body(200, document)

    async def _show_page(self, exchange: Exchange) -> None:
        _, page = await self._pages()
        await exchange.send_page(200, HEADERS, page)

    async def _pages(self) -> tuple[bytes, bytes]:
        """Both, made in a thread: it takes a tenth of a second."""
        if self._made is None:
            self._made = asyncio.create_task(asyncio.to_thread(self._make))
        return await asyncio.shield(self._made)

    def _make(self) -> tuple[bytes, bytes]:
        document = openapi_document(self._told)
        return msgspec.json.encode(document), render(document)
