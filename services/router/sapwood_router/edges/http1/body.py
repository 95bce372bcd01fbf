"""What has come of a request's body."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from sapwood_common.errors import SapwoodError
from sapwood_net.pacing.body_memory import BodyMemory
from sapwood_router.edges.http1.chunks import ChunkReader
from sapwood_router.edges.http1.errors import HttpError
from sapwood_router.edges.http1.growing_bytes import GrowingBytes

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
        """What has come of a body that is waited for."""
        self._dropped = False
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

    @property
    def whole(self) -> bytes:
        """What has come of it while somebody waits for it. To be sliced, and dropped once there is an :attr:`error`."""
        return b"" if self._whole is None else self._whole.view()

    def drop(self) -> None:
        """What has come and what still comes is for nobody."""
        self._dropped = True
        self._parts = []

    def fail(self, error: SapwoodError) -> None:
        """Gives it up: anybody who waits for it is told."""
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
