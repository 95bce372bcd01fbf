"""Handlers of ``asyncio.start_server`` that end with the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def ends_with_loop(serve: Serve) -> Serve:
    """The same handler, which closes its connection when the loop ends; asyncio of Python 3.11 logs a traceback for each one."""

    async def quietly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except asyncio.CancelledError:
            writer.close()

    return quietly
