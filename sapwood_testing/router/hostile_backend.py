"""A server that speaks OpenAI's API as badly as it is told to: a real socket, and whatever bytes a test wants on it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Received:
    """A request as it came; ``closed`` is set when the connection that it came on is over."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    closed: asyncio.Event = field(default_factory=asyncio.Event)


Answer = Callable[[Received, asyncio.StreamWriter], Awaitable[None]]


def reply(status: int, body: Any, **headers: str) -> Answer:
    """Answers with a status and a body: text as it is, anything else as JSON. ``_`` in a header's name is a dash."""

    async def answer(request: Received, writer: asyncio.StreamWriter) -> None:
        raw = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        fields = {"content_type": "application/json", **headers, "content_length": str(len(raw))}
        lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in fields.items())
        writer.write(f"HTTP/1.1 {status} Whatever\r\n{lines}\r\n".encode() + raw)

    return answer


def raw(sent: bytes) -> Answer:
    """Sends these bytes, HTTP or not."""

    async def answer(request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)

    return answer


def events(*items: Any, done: bool = False, hold: asyncio.Event | None = None) -> Answer:
    """Streams events, text as it is and anything else as JSON, and breaks off unless ``done``; first it waits for ``hold``."""

    async def answer(request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
        for item in [*items, *(["[DONE]"] if done else [])]:
            writer.write(f"data: {item if isinstance(item, str) else json.dumps(item)}\n\n".encode())
        await writer.drain()
        if hold is not None:
            await hold.wait()

    return answer


async def hang(request: Received, writer: asyncio.StreamWriter) -> None:
    """Says nothing until the client leaves."""
    await request.closed.wait()


def text_chunk(text: str, **more: Any) -> dict[str, Any]:
    """A chunk of a completion."""
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None, **more}
    return {"id": "cmpl-x", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}


def chat_chunk(**delta: Any) -> dict[str, Any]:
    """A chunk of a chat."""
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
    return {"id": "chatcmpl-x", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}


class HostileBackend:
    """The server; closes each connection after one answer.

    Args:
        owner: Who it says that it is.

    Attributes:
        answer: How it answers; tests change it.
        models: The same for ``/v1/models``.
        received: What it was asked, except for models and metrics; it has no metrics.
    """

    def __init__(self, owner: str = "sapwood") -> None:
        listed = [{"id": "m", "object": "model", "created": 1, "owned_by": owner}]
        self.models = reply(200, {"object": "list", "data": listed})
        self.answer: Answer = hang
        self.received: list[Received] = []
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.url = ""

    async def start(self) -> None:
        """Serves."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Closes port and connections."""
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        watch: asyncio.Task[Any] | None = None
        try:
            first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            request = Received(first.split()[1], headers, json.loads(body) if body else {})
            watch = asyncio.ensure_future(reader.read())
            watch.add_done_callback(lambda _: request.closed.set())
            if request.path.endswith("/models"):
                await self.models(request, writer)
            elif request.path == "/metrics":
                await reply(404, "")(request, writer)
            else:
                self.received.append(request)
                await self.answer(request, writer)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            if watch is not None:
                watch.cancel()
            writer.close()
