"""A client that sends what it likes to a real server, and says what came of it.

The cases are those that h2spec lists, and more of what RFC 9113 says; each is named by its section there (h2spec counts those
of RFC 7540: the preface is its 3.5, malformed requests its 8.1.2) or in RFC 7541. Deviations are argued in the package's README.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from h2.errors import ErrorCodes

from sapwood_net.http2.wire import frames
from sapwood_net.http2.wire.frames import frame

SECONDS = 30
"""Until what is waited for is not going to come."""
PONG = b"are you?"
Frame = tuple[int, int, int, bytes]


def split(data: bytes) -> Iterator[Frame]:
    """The frames of what a client sends."""
    at = 0
    while at < len(data):
        end = at + frames.HEADER + int.from_bytes(data[at : at + 3], "big")
        yield data[at + 3], data[at + 4], int.from_bytes(data[at + 5 : at + 9], "big"), data[at + 9 : end]
        at = end


class Build:
    """Frames of requests.

    Args:
        request_block: A call's header block.
        message: A message with its prefix.
    """

    def __init__(self, request_block: Callable[..., bytes], message: Callable[..., bytes]) -> None:
        self._request_block = request_block
        self.message = message

    def block(self, *more: tuple[str, str], method: str = "Echo") -> bytes:
        return self._request_block(method, *more)

    def headers(self, stream: int, *more: tuple[str, str], method: str = "Echo", end: bool = False) -> bytes:
        return frames.header_frames(stream, self.block(*more, method=method), frames.USUAL_FRAME, end=end)

    def body(self, stream: int, body: bytes = b"body", *, end: bool = True) -> bytes:
        return frame(frames.DATA, frames.END_STREAM if end else 0, stream, self.message(body))

    def echo(self, stream: int, *more: tuple[str, str]) -> bytes:
        """A whole call, which is answered at once."""
        return self.headers(stream, *more) + self.body(stream)

    def open(self, stream: int) -> bytes:
        """A call of which more may come."""
        return self.headers(stream)

    def half_closed(self, stream: int) -> bytes:
        """A whole call whose answer does not come: the stream is half-closed (remote)."""
        return self.headers(stream, method="Wait") + self.body(stream)


class Peer:
    """A connection, past its greeting.

    Attributes:
        settings: The server's.
    """

    def __init__(self, client) -> None:
        self.settings: dict[int, int] = {}
        self.client = client
        self.send = client.send
        self.decode = client.decoder.decode

    async def next(self) -> Frame:
        async with asyncio.timeout(SECONDS):
            return await self.client.frame()

    async def sent_back(self, data: bytes) -> list[Frame]:
        """What is sent back until the server has read ``data``, or closes."""
        self.send(data + frame(frames.PING, 0, 0, PONG))
        found: list[Frame] = []
        try:
            while (received := await self.next()) != (frames.PING, frames.ACK, 0, PONG):
                found.append(received)
        except (asyncio.IncompleteReadError, ConnectionError):
            found.append((-1, 0, 0, b""))
        return found

    async def fails(self, data: bytes, code: ErrorCodes, last: int = 0) -> None:
        """``data`` is a connection error: GOAWAY with the code and the last stream, and the end."""
        *_, goodbye, end = await self.sent_back(data)
        assert end[0] == -1, "the connection goes on"
        assert goodbye[0] == frames.GOAWAY
        found = int.from_bytes(goodbye[3][:4], "big"), ErrorCodes(int.from_bytes(goodbye[3][4:8], "big"))
        assert found == (last, code)

    async def resets(self, data: bytes, code: ErrorCodes, stream: int = 1) -> None:
        """``data`` is a stream error: RST_STREAM with the code, and other streams continue."""
        ended = [item for item in await self.sent_back(data) if item[0] in (frames.RST_STREAM, frames.GOAWAY, -1)]
        assert ended == [(frames.RST_STREAM, 0, stream, code.to_bytes(4, "big"))]

    async def ignores(self, data: bytes) -> None:
        """``data`` ends nothing."""
        assert not {frames.RST_STREAM, frames.GOAWAY, -1} & {item[0] for item in await self.sent_back(data)}

    async def status(self, stream: int) -> dict[str, str]:
        """The last header fields of a stream that ends well."""
        found: dict[str, str] = {}
        while True:
            kind, flags, number, payload = await self.next()
            assert kind not in (frames.RST_STREAM, frames.GOAWAY), payload
            if kind == frames.HEADERS:
                fields = dict(self.decode(payload))
                found = fields if number == stream else found
            if number == stream and flags & frames.END_STREAM:
                return found

    async def answers(self, data: bytes) -> None:
        """``data`` ends with a call that is answered well."""
        self.send(data)
        *_, (_, _, stream, _) = split(data)
        stream &= 0x7FFFFFFF
        assert (await self.status(stream))["grpc-status"] == "0"


@pytest.fixture
async def build(request_block, grpc_message) -> Build:
    return Build(request_block, grpc_message)


@pytest.fixture
async def stranger(running) -> AsyncIterator[Peer]:
    """A connection that has not said anything."""
    client = await running.connect(greet=False)
    yield Peer(client)
    client.writer.transport.abort()


@pytest.fixture
async def peer(running, until) -> AsyncIterator[Peer]:
    client = await running.connect()
    client.send(frame(frames.SETTINGS, frames.ACK, 0))
    peer = Peer(client)
    peer.settings = dict(frames.parse_settings((await peer.next())[3]))
    assert [(await peer.next())[:2] for _ in range(2)] == [(frames.WINDOW_UPDATE, 0), (frames.SETTINGS, frames.ACK)]
    yield peer
    client.writer.transport.abort()
    await until(lambda: not running.server.connections)
