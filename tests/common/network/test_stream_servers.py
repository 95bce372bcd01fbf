"""Connections that are open when a process ends say nothing in its log."""

import asyncio
import logging

from sapwood_common.network.stream_servers import ends_with_loop


def test_open_connections_log_nothing_when_the_loop_ends(caplog) -> None:
    closed = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.read()
        finally:
            closed.append(writer)

    async def run() -> None:
        server = await asyncio.start_server(ends_with_loop(serve), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        while len(asyncio.all_tasks()) <= len(strangers):
            await asyncio.sleep(0)

    with caplog.at_level(logging.ERROR):
        asyncio.run(run())
    assert len(closed) == 3
    assert not caplog.records
