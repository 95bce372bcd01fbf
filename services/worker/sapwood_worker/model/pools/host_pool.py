"""The memory of the second tier: host pages, each one contiguous record that also is the object a store keeps.

A record is ``HEADER_BYTES`` of header (filled in by the third tier alone), then the page of each layer (``KVLayout.offsets``), as
it lies on the device. So a store reads and writes a page in one piece and without a copy, while a copy to or from the device
moves one piece a layer. Where ranks share a pool, a record holds their parts side by side. A store's object is put together from
them as one rank alone would write it, so that any number of ranks can read it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sapwood_common.errors import ConfigError
from sapwood_worker.model.pools.page_order import PageOrder
from sapwood_worker.model.pools.page_parts import PartsOfPages
from sapwood_worker.model.pools.shared_memory import SharedMemory

Bytes = npt.NDArray[np.uint8]

HEADER_BYTES = 128
SCRATCH_PAGES = 4
BATCH_PAGES = 32
"""Pages whose objects are asked for at once, at most."""
ARRIVING_PAGES = 8 * BATCH_PAGES
"""Pages that are read from stores and other workers at once, at most, where ranks are on several hosts."""
_ALIGNMENT = 128
_MOST_OF_FREE = 0.9


class HostPool:
    """Host memory for pages, claimed as it is used.

    Ranks that run a model together share a pool: a page's content is their parts side by side, and each copies its own.

    Args:
        num_pages: Pages.
        page_bytes: Bytes of a page's content.
        memory: Where the records lie; None: in memory of this process.
        part: This rank's bytes of a page's content; None: all.
        order: The order of the ranks' parts; None: an object is a record as it lies.
        others: The pools of the ranks that have requests of their own, after this one's; on the first rank.

    Attributes:
        num_pages, page_bytes, others: The arguments.
        object_bytes: Bytes of the content of a page's object.
        whole_bytes: Bytes of a page's content on all hosts.
        in_place: Whether a page's record is its object.
        buffers: uint8 [..., bytes]: where the objects are that are read and written elsewhere.
        shared: The memory, if other processes of this host find the objects in it, each in its page's record; None: they do not.
        part_bytes: Bytes of this rank's part of a page's content.
        parts: What is there of pages that a step is filling.
        records: uint8 [num_pages + SCRATCH_PAGES, record_bytes]: header, content, padding. The last ones are not pages of the
            cache: whoever opens a store tests and measures it with them. With an order BATCH_PAGES more follow, for objects.
    """

    def __init__(
        self,
        num_pages: int,
        page_bytes: int,
        memory: SharedMemory | None = None,
        part: slice | None = None,
        order: PageOrder | None = None,
        others: Sequence[HostPool] = (),
    ) -> None:
        self.num_pages = num_pages
        self.others = others
        self.page_bytes = self.whole_bytes = page_bytes
        self.object_bytes = page_bytes if order is None else order.object_bytes
        self.in_place = order is None
        self.parts = PartsOfPages()
        self._order = order
        self._packing = threading.Lock()
        self._part = slice(0, page_bytes) if part is None else part
        self.part_bytes = self._part.stop - self._part.start
        self._memory = memory
        self.shared = memory if order is None else None
        shape = num_records(num_pages, order), record_bytes(page_bytes)
        self.records = np.empty(shape, np.uint8) if memory is None else memory.array().reshape(shape)
        self.buffers = self.records

    @property
    def in_one(self) -> bool:
        """Whether this rank fills all of a page's record, as its object has it."""
        return self.in_place and self.part_bytes == self.page_bytes

    @property
    def content(self) -> npt.NDArray[np.uint8]:
        """uint8 [num_pages, part_bytes]: this rank's part of each page; a view."""
        return self.records[: self.num_pages, HEADER_BYTES : HEADER_BYTES + self.page_bytes][:, self._part]

    def record(self, page: int) -> memoryview:
        """Header and content of a page, writable, in place."""
        return memoryview(self.records[page])[: HEADER_BYTES + self.object_bytes]

    @contextlib.contextmanager
    def arriving(self, pages: Sequence[int]) -> Iterator[list[memoryview]]:
        """Where the objects of ARRIVING_PAGES pages at most are read to, header and content; may wait until others' are done.
        :meth:`unpack` makes pages of those that are good."""
        yield list(map(self.record, pages))

    def unpack(self, pages: Sequence[int], records: Sequence[memoryview]) -> None:
        """Makes the ranks' parts of objects that were read.

        Args:
            pages: The pages.
            records: For each what :meth:`arriving` gave.
        """
        if self._order is not None:
            for page in pages:
                self._order.spread(self._own(page))

    def packed(self, page: int) -> memoryview:
        """A page's object, header and content: the record itself or, of ranks' parts, new memory; no header then."""
        return self.record(page) if self._order is None else self._gathered(page, self._order)

    @contextlib.contextmanager
    def objects(self, pages: Sequence[int]) -> Iterator[list[memoryview]]:
        """The objects of BATCH_PAGES pages at most, as by :meth:`packed`, in memory of the pool; of ranks' parts one caller
        at a time has them."""
        if self._order is None:
            yield [self.record(page) for page in pages]
            return
        with self._packing:
            yield [
                self._gathered(page, self._order, into)
                for page, into in zip(pages, self.records[self.num_pages + SCRATCH_PAGES :], strict=False)
            ]

    def _own(self, page: int) -> Bytes:
        """uint8 [page_bytes]: this host's parts of a page; a view."""
        return self.records[page, HEADER_BYTES : HEADER_BYTES + self.page_bytes]

    def _gathered(self, page: int, order: PageOrder, into: Bytes | None = None) -> memoryview:
        found = np.empty(HEADER_BYTES + self.object_bytes, np.uint8) if into is None else into
        order.gather(self._own(page), found[HEADER_BYTES:])
        return memoryview(found.data)[: HEADER_BYTES + self.object_bytes]


def record_bytes(page_bytes: int) -> int:
    """Bytes from one record to the next."""
    return -(-(HEADER_BYTES + page_bytes) // _ALIGNMENT) * _ALIGNMENT


def num_records(num_pages: int, order: PageOrder | None) -> int:
    """Records of a pool."""
    return num_pages + SCRATCH_PAGES + (0 if order is None else BATCH_PAGES)


def pool_bytes(num_pages: int, page_bytes: int, order: PageOrder | None = None) -> int:
    """Bytes of a pool."""
    return num_records(num_pages, order) * record_bytes(page_bytes)


def host_pool_pages(*, page_bytes: int, num_device_pages: int, gigabytes: float, ratio: float) -> int:
    """How many pages the second tier gets; 0: there is none.

    Args:
        page_bytes: Bytes of a page's content.
        num_device_pages: Pages of the first tier.
        gigabytes: Memory in GiB; 0: the ratio decides.
        ratio: Host pages for each device page; 0: the memory decides.

    Raises:
        ConfigError: The machine does not have that much memory free.
    """
    pages = int(gigabytes * (1 << 30)) // record_bytes(page_bytes) if gigabytes else int(ratio * num_device_pages)
    if not pages:
        if gigabytes or ratio:
            raise ConfigError(f"--host-cache: not even one page of {page_bytes} bytes")
        return 0
    wanted, free = pages * record_bytes(page_bytes), available_memory()
    if free is not None and wanted > _MOST_OF_FREE * free:
        raise ConfigError(
            f"--host-cache: the host cache of {wanted / (1 << 30):.1f} GiB does not fit in the "
            f"{free / (1 << 30):.1f} GiB of memory that are free"
        )
    return pages


def memory_limit(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory that the machine has, or this process's control group may have if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int((cgroup / "memory.max").read_text()))
    except (OSError, ValueError):  # no control groups of version 2, or no limit
        return total


def available_memory(cgroup: Path = Path("/sys/fs/cgroup"), meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Bytes that this process could still get, by the machine's and its control group's limits; None if both are unknown."""
    limits: list[int] = []
    if meminfo.is_file():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        limits.append(int(fields["MemAvailable"].split()[0]) * 1024)
    try:
        most, used = (int((cgroup / f"memory.{name}").read_text()) for name in ("max", "current"))
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        limits.append(most - used + int(stat.get("inactive_file", 0)))  # the kernel drops cached files if need be
    except (OSError, ValueError):  # no control groups of version 2, or no limit
        pass
    return min(limits, default=None)
