"""The second tier of ranks on several hosts, as rank 0 has it: parts of a page that lie on other hosts come and go over a
connection to each, so that stores and other workers see whole pages. The connections are not encrypted.
"""

from __future__ import annotations

import contextlib
import secrets
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from sapwood_common.network.keyed_ways import KEY_BYTES, accept, connect, listen
from sapwood_worker.model.pools.host_pool import (
    ARRIVING_PAGES,
    BATCH_PAGES,
    HEADER_BYTES,
    SCRATCH_PAGES,
    Bytes,
    HostPool,
    PageOrder,
    SharedMemory,
    record_bytes,
)

_ASK = struct.Struct("!?I")
_COMING_SECONDS = 60.0
_Meeting = tuple[int, bytes]
"""The port at which rank 0 listens, and the key that those who come show that they know."""


class DistantPages:
    """Another host's parts of each page. May be called from several threads.

    Args:
        way: The connection to :func:`serve_pages` there.
        part: Where among the parts of all hosts they are.
    """

    def __init__(self, way: Connection, part: slice) -> None:
        self._way, self._part = way, part
        self._asking = threading.Lock()

    def read(self, pages: Sequence[int], into: Bytes) -> None:
        """Fills in the host's parts of each page's content, uint8 [pages, bytes of all hosts' parts]."""
        with self._asking:
            self._ask(False, pages)
            for content in into:
                self._way.recv_bytes_into(content[self._part])

    def write(self, pages: Sequence[int], contents: Bytes) -> None:
        """Writes the host's parts of each page, whose content is given as to :meth:`read`; they are there when it returns."""
        with self._asking:
            self._ask(True, pages)
            for content in contents:
                self._way.send_bytes(content[self._part].data)
            self._way.recv_bytes()

    def _ask(self, writes: bool, pages: Sequence[int]) -> None:
        self._way.send_bytes(_ASK.pack(writes, len(pages)) + np.array(pages, np.int64).tobytes())


def serve_pages(way: Connection, pool: HostPool) -> None:
    """Reads and writes this host's parts of pages for rank 0, until that is gone."""
    contents = pool.records[: pool.num_pages, HEADER_BYTES : HEADER_BYTES + pool.page_bytes]
    with contextlib.suppress(EOFError, OSError):
        while True:
            asked = way.recv_bytes()
            writes, _ = _ASK.unpack_from(asked)
            for page in np.frombuffer(asked, np.int64, offset=_ASK.size):
                if writes:
                    way.recv_bytes_into(contents[page])
                else:
                    way.send_bytes(contents[page].data)
            if writes:
                way.send_bytes(b"")


def join_hosts(
    rank: int, exchange: Callable[[Any, Any], list[Any]], pool: HostPool | None, serving: Sequence[int], host: str
) -> list[Connection]:
    """Connects rank 0 with the ranks that have what it lacks; called by all ranks together.

    Args:
        rank: This rank's number.
        exchange: Gives the values of all ranks.
        pool: The pool that this rank serves; None: it is not one of those ranks.
        serving: Those ranks.
        host: Rank 0's address.

    Returns:
        On rank 0, the connections to them, in their order; elsewhere none.

    Raises:
        ConfigError: One cannot reach it.
    """
    if rank == 0:
        with listen(host) as listener:
            key = secrets.token_bytes(KEY_BYTES)
            exchange((listener.getsockname()[1], key), _Meeting)
            return accept(listener, key, serving, _COMING_SECONDS)
    port, key = exchange((0, bytes(KEY_BYTES)), _Meeting)[0]
    if pool is not None:
        way = connect(f"{host}:{port}", key, rank)
        threading.Thread(target=serve_pages, args=(way, pool), name="pages-for-rank-0", daemon=True).start()
    return []


class PoolOverHosts(HostPool):
    """Host pages that are split over several hosts. Objects are put together, and taken apart, in memory of rank 0's own.

    Args:
        num_pages: Pages.
        page_bytes: Bytes of this host's parts of a page's content.
        memory: As :class:`HostPool` takes it.
        part: The same.
        order: The order of the parts of all hosts' ranks, this host's first.
        distant: The other hosts' parts.
        whole_bytes: Bytes of all hosts' parts.
    """

    def __init__(
        self,
        num_pages: int,
        page_bytes: int,
        memory: SharedMemory | None,
        part: slice | None,
        order: PageOrder,
        distant: Sequence[DistantPages],
        whole_bytes: int,
    ) -> None:
        super().__init__(num_pages, page_bytes, memory, part)
        self.object_bytes, self.whole_bytes = order.object_bytes, whole_bytes
        self.in_place, self.shared = False, None
        self._distant, self._all_parts = distant, order
        # Buffers for objects: of scratch pages, outgoing and incoming ones.
        count = SCRATCH_PAGES + BATCH_PAGES + ARRIVING_PAGES
        self.buffers = np.empty((count, record_bytes(order.object_bytes)), np.uint8)
        self._free = list(range(count - ARRIVING_PAGES, count))
        self._freed = threading.Condition()

    def record(self, page: int) -> memoryview:
        """Header and content of a scratch page: others have none."""
        return self._object(page - self.num_pages)

    @contextlib.contextmanager
    def arriving(self, pages: Sequence[int]) -> Iterator[list[memoryview]]:
        with self._freed:
            self._freed.wait_for(lambda: len(self._free) >= len(pages))
            rows = [self._free.pop() for _ in pages]
        try:
            yield list(map(self._object, rows))
        finally:
            with self._freed:
                self._free += rows
                self._freed.notify_all()

    def unpack(self, pages: Sequence[int], records: Sequence[memoryview]) -> None:
        contents = np.empty((len(pages), self.whole_bytes), np.uint8)
        for content, record in zip(contents, records, strict=True):
            self._all_parts.spread(content, np.frombuffer(record, np.uint8)[HEADER_BYTES:])
        for each in self._distant:
            each.write(pages, contents)
        for page, content in zip(pages, contents, strict=True):
            self._own(page)[:] = content[: self.page_bytes]

    def packed(self, page: int) -> memoryview:
        found = np.empty(HEADER_BYTES + self.object_bytes, np.uint8)
        self._pack([page], [found])
        return memoryview(found.data)

    @contextlib.contextmanager
    def objects(self, pages: Sequence[int]) -> Iterator[list[memoryview]]:
        with self._packing:
            records = [self._object(SCRATCH_PAGES + index) for index in range(len(pages))]
            self._pack(pages, [np.frombuffer(each, np.uint8) for each in records])
            yield records

    def _object(self, row: int) -> memoryview:
        return memoryview(self.buffers[row])[: HEADER_BYTES + self.object_bytes]

    def _pack(self, pages: Sequence[int], into: Sequence[Bytes]) -> None:
        contents = np.empty((len(pages), self.whole_bytes), np.uint8)
        for each in self._distant:
            each.read(pages, contents)
        for page, content, found in zip(pages, contents, into, strict=True):
            content[: self.page_bytes] = self._own(page)
            self._all_parts.gather(content, found[HEADER_BYTES:])
