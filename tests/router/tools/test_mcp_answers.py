"""Answers of MCP servers that are made to fill the router's memory."""

from __future__ import annotations

import asyncio
import gzip

import pytest

from sapwood_router.tools.mcp_servers import McpError, McpServer, McpServers

_BEGIN = b'{"jsonrpc":"2.0","id":0,"result":{"x":"'
_LENGTH = 64 << 20


@pytest.mark.parametrize(
    ("kind", "says"), [("endless", "more than 4194304 bytes"), ("compressed", "though it was asked not to be")]
)
async def test_an_answer_that_is_too_long_or_compressed_is_not_read(kind: str, says: str) -> None:
    written = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        try:
            await reader.readuntil(b"\r\n\r\n")
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n"
            if kind == "compressed":
                content = gzip.compress(_BEGIN + b"A" * (8 << 20))
                writer.write(head + b"content-encoding: gzip\r\n\r\n" + content)
            else:
                writer.write(head + b"\r\n" + _BEGIN)
                while written < _LENGTH:
                    writer.write(b"A" * 65_536)
                    written += 65_536
                    await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        hostile = McpServer("x", f"http://127.0.0.1:{port}/mcp", timeout=60.0, guarded=False)
        with pytest.raises(McpError, match=says):
            await McpServers(None).list_tools(hostile)
    assert written < _LENGTH
