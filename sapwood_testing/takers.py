"""Protocols that keep what a connection brings, for tests of connections."""

from __future__ import annotations

import asyncio


class Turns:
    """Numbers the turns of the running loop."""

    def __init__(self) -> None:
        self.number = 0
        self._next()

    def _next(self) -> None:
        self.number += 1
        self._handle = asyncio.get_running_loop().call_soon(self._next)

    def stop(self) -> None:
        self._handle.cancel()


class Taker(asyncio.Protocol):
    """Keeps what comes, and in which turn of the loop."""

    def __init__(self, turns: Turns | None = None) -> None:
        self.content = bytearray()
        self.by_turn: dict[int, int] = {}
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.made = asyncio.Event()
        self.ended = self.write_paused = False
        self.drained = asyncio.Event()
        self._turns = turns

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.made.set()

    def data_received(self, data: bytes) -> None:
        self.content += data
        if self._turns is not None:
            self.by_turn[self._turns.number] = self.by_turn.get(self._turns.number, 0) + len(data)

    def eof_received(self) -> None:
        self.ended = True

    def pause_writing(self) -> None:
        self.write_paused = True

    def resume_writing(self) -> None:
        self.write_paused = False
        self.drained.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set_result(None)


class BufferedTaker(asyncio.BufferedProtocol):
    """The same with a small memory of its own."""

    def __init__(self) -> None:
        self.inner = Taker()
        self._memory = memoryview(bytearray(1000))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.inner.connection_made(transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._memory

    def buffer_updated(self, nbytes: int) -> None:
        self.inner.data_received(bytes(self._memory[:nbytes]))

    def eof_received(self) -> None:
        self.inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self.inner.connection_lost(exc)
