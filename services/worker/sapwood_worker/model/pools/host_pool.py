"""The second tier's memory: its pages, the order of their bytes, and parts of pages that are under way."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sapwood_common.errors import ConfigError
from sapwood_worker.records.kv_layout import KVLayout

# The memory of the second tier: host pages, each one contiguous record that also is the object a store keeps.
#
# A record is ``HEADER_BYTES`` of header (filled in by the third tier alone), then the page of each layer
# (``KVLayout.offsets``), as it lies on the device. So a store reads and writes a page in one piece and without a copy,
# while a copy to or from the device moves one piece a layer. Where ranks share a pool, a record holds their parts side
# by side. A store's object is put together from them as one rank alone would write it, so that any number of ranks can
# read it.


# The two orders of a page's content: the ranks' parts side by side, and as one rank would keep it.


Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class RankPart:
    """A rank's part of a page.

    Attributes:
        start: Where its part begins in the content.
        layout: Its stage's layers, and its heads of them.
        rank: Which of the tensor-parallel ranks of its stage it is.
        ranks: How many there are.
    """

    start: int
    layout: KVLayout
    rank: int
    ranks: int


class PageOrder:
    """Goes from one order to the other.

    A layer's part of a page is ``[part][head][slot][dim]``, so a range of heads is one piece in each of them. Where ranks keep
    the same head, all have it.

    Args:
        whole: The layout of one rank that keeps everything, in the order HND.
        parts: The part of each rank that has bytes of its own.

    Attributes:
        object_bytes: Bytes of a page's content as one rank would keep it.
    """

    def __init__(self, whole: KVLayout, parts: Sequence[RankPart]) -> None:
        self.object_bytes = whole.page_bytes
        # For each component of each part: how many pieces it has (its layers times a layer's parts); where it begins among the
        # ranks' parts, and a piece's bytes there; where it begins in the whole, a piece's bytes there (of all heads), and where
        # the part's own heads begin among these.
        self._pieces: list[tuple[int, int, int, int, int, int]] = []
        offsets = whole.offsets()
        for part in parts:
            at = part.layout.offsets()
            for all_heads, own in zip(whole.components, part.layout.components, strict=True):
                if not own.layers:
                    continue
                first, count = own.layers[0], len(own.layers) * own.parts
                piece = part.layout.layer_bytes(own) // own.parts
                width = whole.layer_bytes(all_heads) // own.parts
                each = width // all_heads.heads
                head = 0 if own.sharding == "replicated" else part.rank * all_heads.heads // part.ranks
                self._pieces.append((count, part.start + at[first], piece, offsets[first], width, head * each))

    def gather(self, content: Bytes, into: Bytes) -> None:
        """Writes the content, uint8 of the ranks' parts, as one rank would keep it: uint8 [object_bytes]."""
        for own, whole in self._views(content, into):
            whole[:] = own

    def spread(self, content: Bytes, kept: Bytes | None = None) -> None:
        """Writes what one rank would keep as the content: the ranks' parts side by side.

        Args:
            content: uint8 of all parts; written.
            kept: uint8 [object_bytes]; None: it is in the first bytes of the content.
        """
        kept = content[: self.object_bytes].copy() if kept is None else kept
        for own, whole in self._views(content, kept):
            own[:] = whole

    def _views(self, content: Bytes, whole: Bytes) -> list[tuple[Bytes, Bytes]]:
        """The same bytes in both orders, uint8 [layers * parts, bytes of a rank's heads]; views."""
        return [
            (
                content[start : start + count * piece].reshape(count, piece),
                whole[there : there + count * width].reshape(count, width)[:, head : head + piece],
            )
            for count, start, piece, there, width, head in self._pieces
        ]


# How much of host pages is there while a step is still filling them: some layers after others.


Ranges = list[tuple[int, int]]
"""Bytes of a page's content: where each run begins and ends."""


class PageParts:
    """The pages that one step fills. The step's side tells, others wait."""

    def __init__(self) -> None:
        self._told = threading.Condition()
        self._computed = 0
        self._copied = 0

    def computed(self) -> None:
        """One more group of layers is in each of the device's pages. For any thread."""
        with self._told:
            self._computed += 1
            self._told.notify_all()

    def copied(self) -> None:
        """One more group of layers is in each host page, too. For any thread."""
        with self._told:
            self._copied += 1
            self._told.notify_all()

    def beyond(self, known: int, seconds: float, *, on_device: bool = False) -> int:
        """Waits until there are more than ``known`` groups, or the given seconds are over; returns how many there are. For any
        thread.

        Args:
            known: So many are known of.
            seconds: How long to wait at most.
            on_device: Whether it is about the device's pages, not the host's.
        """

        def there() -> int:
            return self._computed if on_device else self._copied

        with self._told:
            self._told.wait_for(lambda: there() > known, seconds)
            return there()


class PartsOfPages:
    """The parts that steps fill, by page. The step's thread changes it, others look.

    Attributes:
        groups: The ranges of bytes in a page's content that belong to each group of layers, in the order in which steps compute
            them; empty: nothing is known of a step's pages before it ends.
    """

    def __init__(self) -> None:
        self.groups: list[Ranges] = []
        self._of: dict[int, PageParts] = {}

    def begin(self, pages: Iterable[int]) -> PageParts:
        """Pages that a step fills."""
        parts = PageParts()
        self._of.update(dict.fromkeys(pages, parts))
        return parts

    def end(self, pages: Iterable[int], parts: PageParts) -> None:
        """No step fills these any more."""
        for page in pages:
            if self._of.get(page) is parts:
                del self._of[page]

    def of(self, page: int) -> PageParts | None:
        """The copy that is filling a page now; None: there is none, or it has not begun."""
        return self._of.get(page)


def layer_groups(layers: Sequence[int], most: int) -> list[list[int]]:
    """Cuts layers, in the order in which they are computed, into at most this many groups, and at least two where there are two
    layers.

    The last layer is a group alone, because its copy overlaps with no computation and should be short.
    """
    *others, last = sorted(layers)
    parts = np.array_split(np.array(others), min(most - 1, len(others))) if others else []
    return [*(part.tolist() for part in parts), [last]]


def ranges_of(layers: Iterable[int], offsets: Mapping[int, int], sizes: Mapping[int, int]) -> Ranges:
    """The ranges of some layers' bytes in a page's content, given where each layer begins there and how many bytes it has."""
    ranges: Ranges = []
    for layer in sorted(layers, key=offsets.__getitem__):
        start, end = offsets[layer], offsets[layer] + sizes[layer]
        if ranges and ranges[-1][1] == start:
            start, _ = ranges.pop()
        ranges.append((start, end))
    return ranges


# Memory that the processes of one machine share. The kernel frees it with the last of them, however they end.


class SharedMemory:
    """Memory without a name (Linux's memfd), allocated at first use.

    Args:
        descriptor: The file that stands for it; closed with this object.

    Attributes:
        path: By which other processes of this user open it while this object lives.
        identity: The file's device and inode: of all that is open on this machine only this memory has them.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}"
        found = os.fstat(descriptor)
        self.identity = found.st_dev, found.st_ino
        weakref.finalize(self, os.close, descriptor)

    @staticmethod
    def create(size: int) -> SharedMemory:
        """New memory of this many bytes.

        Raises:
            ConfigError: The system has no such memory.
        """
        if not hasattr(os, "memfd_create"):
            raise ConfigError("--host-cache: processes share the host cache on Linux only")
        memory = SharedMemory(os.memfd_create("sapwood-host-cache", os.MFD_CLOEXEC))
        os.truncate(memory._descriptor, size)
        return memory

    @staticmethod
    def open(path: str) -> SharedMemory:
        """The memory that another process has created."""
        return SharedMemory(os.open(path, os.O_RDWR | os.O_CLOEXEC))

    def array(self) -> npt.NDArray[np.uint8]:
        """All of its bytes; they stay while the array does."""
        return np.frombuffer(mmap.mmap(self._descriptor, 0), np.uint8)


HEADER_BYTES = 128
SCRATCH_PAGES = 4
BATCH_PAGES = 32
"""Pages whose objects are asked for at once, at most."""
ARRIVING_PAGES = 8 * BATCH_PAGES
"""Pages that are read from stores and other workers at once, at most, where ranks are on several hosts."""
_ALIGNMENT = 128
_MOST_OF_FREE = 0.9


class HostPool:
    """Host memory for pages, allocated at first use.

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
        parts: Which layers are present of pages that a step is filling.
        records: uint8 [num_pages + SCRATCH_PAGES, record_bytes]: header, content, padding. The last ones are not pages of the
            cache: the opener of a store tests and measures it with them. With an order BATCH_PAGES more follow, for objects.
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
