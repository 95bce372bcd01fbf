"""/metrics: rendering takes milliseconds and holds the interpreter, so whoever asks often waits for it together with others."""

from __future__ import annotations

import asyncio
import time

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

_REST = 9
"""The pause between two renderings of one content type, as a multiple of the time the last one took."""


class MetricsPage:
    """Renders a registry in a thread, each time for all who ask until it begins.

    Args:
        registry: What is shown.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._coming: dict[str, asyncio.Task[bytes]] = {}
        """Renderings that have not begun, by content type."""
        self._due: dict[str, float] = {}
        """When the next may begin, on the event loop's clock."""

    async def render(self, accept: str) -> tuple[bytes, str]:
        """The page as it is from now on, and its content type, which ``accept``, the request's header, chooses."""
        _, content_type = choose_encoder(accept)
        if content_type not in self._coming:
            self._coming[content_type] = asyncio.create_task(self._render(accept, content_type))
        return await asyncio.shield(self._coming[content_type]), content_type

    async def _render(self, accept: str, content_type: str) -> bytes:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._due.get(content_type, 0.0) - loop.time())
        del self._coming[content_type]
        encode, _ = choose_encoder(accept)
        began = time.perf_counter()
        page: bytes = await asyncio.to_thread(encode, self._registry)
        self._due[content_type] = loop.time() + _REST * (time.perf_counter() - began)
        return page
