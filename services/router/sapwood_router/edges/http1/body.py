"""What has come of a request's body."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Awaitable, Callable
from typing import cast

import httptools

from sapwood_common.errors import SapwoodError
from sapwood_net.pacing.body_memory import BodyMemory
from sapwood_router.edges.http1.errors import HttpError

_HEAD = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
_EMPTY_LINE = b"\r\n\r\n"
_SLICE = 4096
"""Bytes that are read at a time: at most some 700 chunks, each of which costs as much as a kilobyte of one."""
_MOST_FRAMING = 64 * 1024
_FRAMING_PER_BYTE = 8
"""Sizes, extensions and trailers may come to ``_MOST_FRAMING`` and this for each byte of the body: more than chunks of a byte
need."""


class ChunkReader:
    """Reads one body; httptools calls it back.

    httptools cannot be stopped: given all that came it would read the next request, and the ones after it. A body in chunks ends
    with an empty line and nowhere else, so it is given what ends with one, or has none.

    Attributes:
        complete: Whether the body has ended.
        fed: Bytes that were read, framing included.
    """

    __slots__ = ("_allowed", "_parser", "_parts", "_tail", "complete", "fed")

    def __init__(self) -> None:
        self.complete = False
        self.fed = 0
        self._parts: list[bytes] = []
        self._tail = b""
        """The last three bytes: an empty line may begin in them."""
        self._allowed = _MOST_FRAMING
        """Bytes of framing that may still come."""
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self._parser.feed_data(_HEAD)

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        self.complete = True

    def on_message_begin(self) -> None:
        if self.complete:
            raise HttpError(400, "malformed chunks")

    def read(self, data: bytes, at: int) -> tuple[int, list[bytes]]:
        """Reads some of ``data`` from ``at`` on. Returns where it stopped, and the body's bytes on the way.

        Raises:
            HttpError: The chunks are malformed, or next to nothing is in them.
        """
        assert self._parser is not None, "it is complete"
        window = self._tail + data[at : at + _SLICE]
        found = window.find(_EMPTY_LINE)
        if found >= 0:
            window = window[: found + len(_EMPTY_LINE)]
        piece = window[len(self._tail) :]
        self._tail = window[-3:]
        try:
            self._parser.feed_data(piece)
        except httptools.HttpParserError as error:
            raise HttpError(400, f"malformed chunks: {str(error)[:100]}") from None
        self.fed += len(piece)
        parts, self._parts = self._parts, []
        size = sum(map(len, parts))
        self._allowed += _FRAMING_PER_BYTE * size - (len(piece) - size)
        if self._allowed < 0:
            raise HttpError(400, "the body's chunks are nearly all sizes, extensions or trailers")
        if self.complete:
            self._parser = None  # the two would keep each other until the collector comes
        return at + len(piece), parts

    def close(self) -> None:
        """To be called when it is given up."""
        self._parser = None


_LARGE = 128 * 1024
"""Bodies of at least this many bytes have memory of their own. malloc would put them wherever earlier requests left room between
other things, and what is freed there stays this process's until it is trimmed.
"""


class GrowingBytes:
    """Grows in place: to join 16 MB takes 10 ms."""

    __slots__ = ("_map", "_small", "size")

    def __init__(self) -> None:
        self.size = 0
        self._small = bytearray()
        self._map: mmap.mmap | None = None
        """Pages that were never written take no memory."""

    def add(self, part: bytes) -> None:
        """Adds to them. Not after :meth:`view`."""
        begin, self.size = self.size, self.size + len(part)
        if self._map is not None:
            if self.size > len(self._map):
                self._map.resize(2 * self.size)
            self._map[begin : self.size] = part
            return
        self._small += part
        if self.size > _LARGE:
            self._map = mmap.mmap(-1, 2 * self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._map[: self.size] = bytes(self._small)
            self._small = bytearray()

    def view(self) -> bytes:
        """All of them, to be sliced and decoded: a ``bytearray`` or ``memoryview`` that nobody changes any more."""
        whole = self._small if self._map is None else memoryview(self._map)[: self.size]
        return cast(bytes, whole)


MOST_UNASKED, _MOST_CHUNKS_UNASKED = 64 * 1024, 16 * 1024
"""Bytes of a body that are taken before somebody asks for it; in chunks, framing included, which take more time."""


class Body:
    """The body of one request.

    Args:
        length: Its bytes; None: it comes in chunks.
        memory: Bounds the memory of all incomplete bodies together.

    Attributes:
        size: Bytes that came.
        complete: Whether all came.
        error: Why the rest is not read any more; None while it is.
    """

    __slots__ = (
        "_chunks",
        "_dropped",
        "_left",
        "_memory",
        "_most",
        "_parts",
        "_streams",
        "_waiter",
        "_whole",
        "complete",
        "error",
        "length",
        "size",
    )

    def __init__(self, length: int | None, memory: BodyMemory) -> None:
        self.length = length
        self.size = 0
        self.complete = length == 0
        self.error: SapwoodError | None = None
        self._left = length or 0
        self._chunks = ChunkReader() if length is None else None
        self._memory = memory
        self._parts: list[bytes] = []
        self._whole: GrowingBytes | None = None
        """The received part of a body that a reader waits for."""
        self._dropped = False
        self._streams = False
        """Whether it is read piece by piece."""
        self._most = -1
        self._waiter: asyncio.Future[None] | None = None

    @property
    def hungry(self) -> bool:
        """Whether more of it is to be read now."""
        if self.complete or self.error is not None:
            return False
        if self._dropped or self._waiter is not None:
            return True
        return self.size < MOST_UNASKED if self._chunks is None else self._chunks.fed < _MOST_CHUNKS_UNASKED

    def left_at_most(self, count: int) -> bool:
        """Whether it is known that no more than ``count`` bytes are still to come."""
        return self.complete or (self._chunks is None and self._left <= count)

    def feed(self, data: bytes, at: int) -> int:
        """Takes some of ``data`` from ``at`` on. Returns where the rest begins. Malformed chunks become its error."""
        if self._chunks is None:
            end = min(len(data), at + self._left)
            parts = [data[at:end]]
            self._left -= end - at
            self.complete = not self._left
        else:
            try:
                end, parts = self._chunks.read(data, at)
            except HttpError as error:
                self.fail(error)
                return len(data)
            self.complete = self._chunks.complete
        self._keep(parts)
        return end

    def take(self, limit: int) -> bytes | None:
        """All of it, once; None if it is not complete or larger than ``limit`` bytes."""
        if not self.complete or self.size > limit:
            return None
        parts, self._parts = self._parts, []
        return b"".join(parts)

    async def receive(
        self, limit: int, wanted: Callable[[], None], look_at: Callable[[Body], Awaitable[None]] | None = None
    ) -> bytes:
        """All of it, once.

        Args:
            limit: The most bytes it may have.
            wanted: Called when it is waited for: more is to be read.
            look_at: Waited for once all of it is there, while it still counts as held and may be given up.

        Raises:
            HttpError: It is larger than ``limit`` bytes, malformed, or comes too slowly.
            UnavailableError: Too much is held of all bodies together.
            RequestCancelledError: The client left.
        """
        if self.error is not None:
            raise self.error
        if (self.length or 0) > limit or self.size > limit:
            raise _too_large(limit)
        if self.complete and look_at is None:
            return self.take(limit) or b""
        self._most = limit
        self._whole = GrowingBytes()
        self._whole.add(b"".join(self._parts))
        self._parts = []
        self._waiter = asyncio.get_running_loop().create_future()
        self._memory.grow(self, self.size)
        try:
            if not self.complete:
                wanted()
            elif not self._waiter.done():
                self._waiter.set_result(None)
            await self._waiter
            if look_at is not None:
                await look_at(self)
                if self.error is not None:
                    raise self.error
            return self.whole
        finally:
            self._waiter = self._whole = None
            self._memory.release(self)

    async def read(self, wanted: Callable[[], None]) -> bytes:
        """The next piece of it, empty at its end: for bodies that nobody wants in memory at once.

        Args:
            wanted: Called when it is waited for: more is to be read.

        Raises:
            HttpError: It is malformed, or comes too slowly.
            RequestCancelledError: The client left.
        """
        self._streams = True
        while not self._parts and not self.complete and self.error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                wanted()
                await self._waiter
            finally:
                self._waiter = None
        if self.error is not None:
            raise self.error
        parts, self._parts = self._parts, []
        return b"".join(parts)

    @property
    def whole(self) -> bytes:
        """The part of the body that has arrived, while a reader waits for it. To be sliced, and dropped once there is an
        :attr:`error`."""
        return b"" if self._whole is None else self._whole.view()

    def drop(self) -> None:
        """Drops the rest of the body: no reader wants it."""
        self._dropped = True
        self._parts = []

    def fail(self, error: SapwoodError) -> None:
        """Abandons the body: its waiting reader gets an error."""
        if self.error is not None or (self.complete and self._waiter is None):
            return
        self.error = error
        self._parts = []
        self._whole = None
        if self._chunks is not None:
            self._chunks.close()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)

    def _keep(self, parts: list[bytes]) -> None:
        count = sum(map(len, parts))
        self.size += count
        if self._dropped:
            return
        if self._waiter is None or self._waiter.done() or self._whole is None:
            self._parts += parts
            if self._streams and (parts or self.complete) and self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)
            return
        for part in parts:
            self._whole.add(part)
        if self.size > self._most:
            self.complete = False
            self.fail(_too_large(self._most))
            return
        self._memory.grow(self, count)
        if self.complete and not self._waiter.done():
            self._waiter.set_result(None)


def _too_large(limit: int) -> HttpError:
    return HttpError(413, f"the body is over the limit of {limit} bytes")
