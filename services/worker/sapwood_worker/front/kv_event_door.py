"""The port of KV events' PUB socket: lets subscribers in, and bounds what each says and how many there are.

A PUB socket keeps every subscription and adds each in the thread that publishes: one subscriber with 150 000 of them costs 7 GB
and stops the publisher for seconds. So subscribers connect to this port, which hands their bytes on to the socket, at most
``MOST_SAID`` from each connection. A subscriber that says more is closed, and with it goes what it asked for. The socket is a
thread's, together with the port: whatever is asked of it, the front goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from sapwood_common.network.newcomers import source

logger = logging.getLogger(__name__)

MOST_SAID = 16 * 1024
"""Bytes that a subscriber may say on one connection: greeting, keys, subscriptions and signs of life."""
MOST_SUBSCRIBERS = 128
"""Connections at a time. Beyond that the oldest of the address with the most leaves."""
_MOST_UNSENT = 100_000
_PIECE = 256 * 1024
_SLICE = 256
"""Messages that are sent between looks at the port."""

Message = tuple[bytes, ...]


class Door:
    """A thread with a PUB socket and its port. Life cycle: construct, :meth:`start`, :meth:`close`.

    Args:
        listener: The port, listening.
        inside: The Unix socket that ``pub`` is bound to.
        pub: The socket; the thread's alone from now on.
    """

    def __init__(self, listener: socket.socket, inside: Path, pub: Any) -> None:
        self._listener, self._inside, self._pub = listener, inside, pub
        self._unsent: deque[Message] = deque(maxlen=_MOST_UNSENT)
        self._loop = asyncio.new_event_loop()
        self._news = asyncio.Event()
        self._stopping = False
        self._guests: dict[Callable[[], None], str | bytes] = {}
        """What closes a connection -> its address, the oldest first."""
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
        self._listener.close()
        self._pub.close(0)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._let_in, sock=self._listener)
        while not self._stopping:
            await self._news.wait()
            self._news.clear()
            while self._unsent and not self._stopping:
                for _ in range(min(_SLICE, len(self._unsent))):
                    with contextlib.suppress(zmq.Again):
                        self._pub.send_multipart(self._unsent.popleft(), zmq.NOBLOCK)
                await asyncio.sleep(0)
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _let_in(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        leave = writer.transport.abort
        self._guests[leave] = source(writer.get_extra_info("peername"))
        if len(self._guests) > MOST_SUBSCRIBERS:
            ((most, _),) = Counter(self._guests.values()).most_common(1)
            oldest = next(each for each, address in self._guests.items() if address == most)
            del self._guests[oldest]
            oldest()
        inner: asyncio.StreamWriter | None = None
        try:
            answers, inner = await asyncio.open_unix_connection(self._inside)
            ways = [
                asyncio.ensure_future(self._pass_on(reader, inner, MOST_SAID)),
                asyncio.ensure_future(self._pass_on(answers, writer, None)),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
        except OSError as error:
            logger.debug("a subscriber of KV events is lost: %s", error)
        finally:
            self._guests.pop(leave, None)
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
