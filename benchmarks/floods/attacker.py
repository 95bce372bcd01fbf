"""A process that floods: so many connections for so many seconds; then it says in a line of JSON what became of them."""

from __future__ import annotations

import argparse
import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from typing import cast

import uvloop
from floods.flood import KEY, Flood
from floods.key_changes import KeyChanger
from floods.tables import FLOODS
from floods.wire import client_tls, find_farewell

_MOST_CONNECTIONS = 20_000
_TAIL = 4096
_CODES = range(1, 14)
"""Of errors, in a GOAWAY; any other is none, but the middle of a frame."""


@dataclass
class Fate:
    """What became of the attack."""

    seconds: float
    """That it lasted."""
    sent: int = 0
    """Bytes."""
    connected: int = 0
    closed: int = 0
    """Connections that the server closed."""
    first_closed: float = 0.0
    """Seconds that the first of these had."""
    rules: dict[str, int] = field(default_factory=dict)
    """What servers said as they closed, or before they read no more, and how often."""


class _Connection(asyncio.Protocol):
    def __init__(self, reads: bool) -> None:
        self._reads = reads
        self._may_write = asyncio.Event()
        self._may_write.set()
        self.lost = asyncio.Event()
        self.tail = b""
        self.received: asyncio.Queue[bytes] | None = None
        """What has come, where that is asked for."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(1 << 20)
        if not self._reads:
            self.transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        self.tail = (self.tail + data[-_TAIL:])[-_TAIL:]
        if self.received is not None:
            self.received.put_nowait(data)

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.received is not None:
            self.received.put_nowait(b"")
        self.lost.set()
        self._may_write.set()

    async def send(self, data: bytes, piece: int = 0) -> None:
        for at in range(0, len(data), piece or len(data) or 1):
            self.transport.write(data[at : at + piece] if piece else data)
        await self._may_write.wait()


async def _change_keys(connection: _Connection) -> AsyncIterator[bytes]:
    """A handshake, and then changes of keys."""
    connection.received = asyncio.Queue()
    changer = KeyChanger()
    try:
        yield changer.shake()
        while not changer.shaken:
            yield changer.shake(await connection.received.get())
            if connection.lost.is_set():
                return
        connection.received = None
        for chunk in changer.changes():
            yield chunk
    finally:
        changer.close()


async def _chunks(flood: Flood, number: int, connection: _Connection) -> AsyncIterator[bytes]:
    if flood.changes_keys:
        async for chunk in _change_keys(connection):
            yield chunk
    for chunk in flood.chunks(number):
        yield chunk


async def _attack(
    flood: Flood, port: int, tls: ssl.SSLContext | None, key: bytes, number: int, until: float, fate: Fate
) -> None:
    loop = asyncio.get_running_loop()
    while time.monotonic() < until and fate.connected < _MOST_CONNECTIONS:
        began = time.monotonic()
        try:
            async with asyncio.timeout(until - began):
                _, connection = await loop.create_connection(
                    lambda: _Connection(flood.reads), "127.0.0.1", port, ssl=tls
                )
        except (OSError, TimeoutError):
            await asyncio.sleep(0.01)
            continue
        fate.connected += 1
        try:
            async with asyncio.timeout(until - time.monotonic()):
                async for chunk in _chunks(flood, number, connection):
                    if connection.lost.is_set():
                        break
                    await connection.send(chunk.replace(KEY, key) if key else chunk, flood.piece)
                    fate.sent += len(chunk)
                    await asyncio.sleep(flood.pause)
                if flood.hang_up is None:
                    await connection.lost.wait()
                else:
                    await asyncio.sleep(flood.hang_up)
        except TimeoutError:
            pass
        rule = _rule(flood, connection)
        if connection.lost.is_set():
            fate.closed += 1
            fate.first_closed = fate.first_closed or time.monotonic() - began
            rule = rule or "closed"
        else:
            connection.transport.abort()
        if rule:
            fate.rules[rule] = fate.rules.get(rule, 0) + 1


def _rule(flood: Flood, connection: _Connection) -> str:
    """What the server said as it closed, or before it read no more; "" for nothing."""
    if flood.front == "grpc":
        said = find_farewell(connection.tail)
        return f"{said.code} {said.text}" if said is not None and said.code in _CODES else ""
    line = connection.tail.split(b"\r\n", 1)[0]
    refused = line.startswith((b"HTTP/1.1 4", b"HTTP/1.1 5"))
    return line.decode("latin-1") if refused or (connection.lost.is_set() and line.startswith(b"HTTP/1.1 ")) else ""


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("flood", choices=[flood.name for flood in FLOODS])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--key", default="", help="that is known; for floods that show one")
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=4.0)
    args = parser.parse_args()
    flood = next(flood for flood in FLOODS if flood.name == args.flood)
    tls = (
        client_tls("h2" if flood.front == "grpc" else None)
        if args.tls and not (flood.raw or flood.changes_keys)
        else None
    )
    fate = Fate(args.seconds)
    until = time.monotonic() + args.seconds
    numbers = range(args.connections * flood.times)
    await asyncio.gather(
        *(_attack(flood, args.port, tls, args.key.encode(), number, until, fate) for number in numbers)
    )
    print(json.dumps(asdict(fate)), flush=True)


if __name__ == "__main__":
    uvloop.run(main())
