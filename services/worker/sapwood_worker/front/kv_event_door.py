"""The ports of KV events: they let subscribers in, and bound what each says and how many there are.

A PUB socket keeps every subscription and adds each in the thread that publishes: one subscriber with 150 000 of them costs 7 GB
and stops the publisher for seconds. So subscribers connect to this port, which hands their bytes on to the socket, at most
``MOST_SAID`` from each connection. A subscriber that says more is closed, and with it goes what it asked for. The socket is a
thread's, together with the ports: whatever is asked of it, the front goes on. Replays' port is one of these, too: their socket
knows no addresses and answers its connections in turn, so that an address may have a few of them at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import zmq

from sapwood_net.sockets.newcomers import source

logger = logging.getLogger(__name__)

MOST_SAID = 16 * 1024
"""Bytes that a subscriber may say on one connection: greeting, keys, subscriptions and signs of life."""
MOST_SUBSCRIBERS = 128
"""Connections to a port at a time. Beyond that the oldest of the address with the most leaves."""
MOST_REPLAYS = 32
"""Connections of an address to replays' port at a time. Beyond that its oldest leaves."""
_MOST_UNSENT = 100_000
_PIECE = 256 * 1024
_SLICE = 256
"""Messages that are sent between looks at the port."""

Message = tuple[bytes, ...]


@dataclass(slots=True, eq=False)
class Way:
    """A port and where it leads.

    Attributes:
        listener: The port, listening.
        inside: The Unix socket that ZeroMQ's is bound to.
        most_of_address: Connections of an address at a time.
        guests: What closes a connection -> its address, the oldest first.
    """

    listener: socket.socket
    inside: Path
    most_of_address: int = MOST_SUBSCRIBERS
    guests: dict[Callable[[], None], str | bytes] = field(default_factory=dict)

    def enter(self, leave: Callable[[], None], address: str | bytes) -> None:
        """Counts a connection; closes one that has no place by it."""
        self.guests[leave] = address
        counts = Counter(self.guests.values())
        crowded = address
        if counts[address] <= self.most_of_address:
            if len(self.guests) <= MOST_SUBSCRIBERS:
                return
            ((crowded, _),) = counts.most_common(1)
        oldest = next(each for each, known in self.guests.items() if known == crowded)
        del self.guests[oldest]
        oldest()


class Door:
    """A thread with a PUB socket and the ports. Life cycle: construct, :meth:`start`, :meth:`close`.

    Args:
        ways: The ports.
        pub: The socket; the thread's alone from now on.
    """

    def __init__(self, ways: Sequence[Way], pub: Any) -> None:
        self._ways, self._pub = ways, pub
        self._unsent: deque[Message] = deque(maxlen=_MOST_UNSENT)
        self._loop = asyncio.new_event_loop()
        self._news = asyncio.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)

    def start(self) -> None:
        """Lets subscribers in."""
        self._thread.start()

    def send(self, message: Message) -> None:
        """Queues a message; never blocks. Where the thread is far behind the oldest is dropped: subscribers see a gap."""
        self._unsent.append(message)
        self._loop.call_soon_threadsafe(self._news.set)

    def close(self) -> None:
        """Ends the thread and closes the socket; what is not sent yet is dropped."""
        self._stopping = True
        if self._thread.ident is not None:
            self._loop.call_soon_threadsafe(self._news.set)
            self._thread.join()
        self._loop.close()
        for way in self._ways:
            way.listener.close()
        self._pub.close(0)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        servers = [await asyncio.start_server(partial(self._let_in, way), sock=way.listener) for way in self._ways]
        while not self._stopping:
            await self._news.wait()
            self._news.clear()
            while self._unsent and not self._stopping:
                for _ in range(min(_SLICE, len(self._unsent))):
                    with contextlib.suppress(zmq.Again):
                        self._pub.send_multipart(self._unsent.popleft(), zmq.NOBLOCK)
                await asyncio.sleep(0)
        for server in servers:
            server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _let_in(self, way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        leave = writer.transport.abort
        way.enter(leave, source(writer.get_extra_info("peername")))
        inner: asyncio.StreamWriter | None = None
        try:
            answers, inner = await asyncio.open_unix_connection(way.inside)
            passing = [
                asyncio.ensure_future(self._pass_on(reader, inner, MOST_SAID)),
                asyncio.ensure_future(self._pass_on(answers, writer, None)),
            ]
            try:
                await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for one in passing:
                    one.cancel()
        except OSError as error:
            logger.debug("a subscriber of KV events is lost: %s", error)
        finally:
            way.guests.pop(leave, None)
            leave()
            if inner is not None:
                inner.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, most: int | None) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_PIECE):
                if most is not None:
                    most -= len(data)
                    if most < 0:
                        logger.info("a subscriber of KV events says more than %d bytes: it is closed", MOST_SAID)
                        return
                writer.write(data)
                await writer.drain()
