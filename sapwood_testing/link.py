"""The way to a server, through this process: it can be cut without a word to either side, as by a switch that dies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from functools import partial


class Link:
    """Listens at an address of this machine's own, and passes on what comes to the same ports of another.

    Args:
        host: Where it listens, a loopback address that nobody else has.
        target: The host that it passes everything on to.
        ports: The ports.

    Attributes:
        reached: Set when the connection that :meth:`hold` waits for has carried as much as it said.
        asked_from: The port from which that connection was opened.
    """

    def __init__(self, host: str, target: str, ports: Sequence[int]) -> None:
        self.host = host
        self.reached = asyncio.Event()
        self.asked_from = 0
        self._target, self._ports = target, ports
        self._flows = asyncio.Event()
        self._flows.set()
        self._go_on = asyncio.Event()
        self._held: tuple[int, int] | None = None
        self._spoilt: tuple[int, int] | None = None
        self._servers: list[asyncio.Server] = []
        self._writers: set[asyncio.StreamWriter] = set()

    async def open(self) -> None:
        """Begins to listen."""
        for port in self._ports:
            server = await asyncio.start_server(partial(self._carry, port), self.host, port)
            self._servers.append(server)

    async def close(self) -> None:
        """Ends all connections, and listens no longer."""
        for server in self._servers:
            server.close()
        self.mend()

    def cut(self) -> None:
        """Carries nothing any more, in either direction; no connection ends."""
        self._flows.clear()

    def mend(self) -> None:
        """Ends the connections of before, and carries new ones."""
        self.let_go()
        for writer in tuple(self._writers):
            writer.transport.abort()
        self._flows.set()

    def hold(self, port: int, count: int) -> None:
        """Has the next connection to a port wait once the server has sent so many bytes, until :meth:`let_go`."""
        self.reached.clear()
        self._go_on.clear()
        self._held = port, count

    def let_go(self) -> None:
        """Holds nothing any more."""
        self._held = None
        self._go_on.set()

    def spoil(self, port: int, place: int) -> None:
        """Has one byte be another of what the server sends on the next connection to a port: the one at a place."""
        self._spoilt = port, place

    async def _carry(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._flows.wait()
        with contextlib.suppress(OSError):
            there, back = await asyncio.open_connection(self._target, port)
            await asyncio.gather(self._pass(reader, back, None), self._pass(there, writer, port))
        writer.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int | None) -> None:
        """Carries one direction to its end; ``port``: of the server that sends it."""
        self._writers.add(writer)
        carried = 0
        with contextlib.suppress(OSError):
            while data := bytearray(await reader.read(1 << 18)):
                if self._spoilt is not None and self._spoilt[0] == port and carried + len(data) > self._spoilt[1]:
                    data[self._spoilt[1] - carried] ^= 1
                    self._spoilt = None
                carried += len(data)
                if self._held is not None and self._held[0] == port and carried >= self._held[1]:
                    self._held = None
                    self.asked_from = writer.get_extra_info("peername")[1]
                    self.reached.set()
                    await self._go_on.wait()
                await self._flows.wait()
                writer.write(data)
                await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()
        self._writers.discard(writer)
