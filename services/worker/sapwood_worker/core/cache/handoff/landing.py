"""Pages of the device that another worker's device fills: so a prompt that is handed off within a host does not pass through the
host's memory, and is not copied to the device when its request starts.

A page is taken from the prefix cache's room (free or evictable), and a transfer owns it until its request may start. Then pages
that follow what is cached of the prompt are shared as if they had been computed here, and the others are given back. Nothing is
written to a page until all steps that had been launched when it was taken are over, and every copy of what it held has ended.

There is no checksum: what moves the bytes is the device. The source says, after they were read, whether its pages still were what
the ticket says (``movers/cuda_ipc.py``). Pages that the source's device does not have any more come through memory of the host,
and are checked there.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from sapwood_worker.core.cache.handoff.mover import PageMover
from sapwood_worker.core.cache.host.host_pages import HostPage
from sapwood_worker.core.cache.page_allocator import PageIds
from sapwood_worker.core.cache.page_key import PageKey, PageName
from sapwood_worker.core.cache.storage.record import verify
from sapwood_worker.model.pools.host_pool import HEADER_BYTES
from sapwood_worker.records.handoff import HandoffTicket

_BATCH = 256
"""A GPU's copy engines carry hundreds of GB/s: what a read takes is its questions and answers."""
_THROUGH_HOST = 16
"""Pages at a time that the source's device does not have any more: of these the host's memory holds a copy on the way."""


class DeviceRoom(Protocol):
    """What the device's pages are taken from, and shared in."""

    @property
    def taken(self) -> Set[int]:
        """The pages that are taken."""
        ...

    @property
    def num_takable(self) -> int:
        """How many pages could be taken now."""
        ...

    def take(self, count: int) -> PageIds:
        """Takes pages, as many of ``count`` as there is room for."""
        ...

    def give_back(self, pages: Sequence[int]) -> None:
        """Frees pages that were taken."""
        ...

    def adopt(self, prompt: Prompt, filled: Callable[[int], int | None]) -> int:
        """Shares pages that were taken, and frees those that are there already.

        Args:
            prompt: Whose they are.
            filled: The page that was filled with the prompt's page of an index; None: none was.

        Returns:
            How many pages of the prompt are cached now.
        """
        ...


class DeviceMover(PageMover, Protocol):
    """A mover that reads into the device's pages, too."""

    def reaches(self, ticket: HandoffTicket) -> bool:
        """Whether a ticket's source may have pages on a device that can be read from here, as far as is known."""
        ...

    def read_to_device(
        self, ticket: HandoffTicket, indices: Sequence[int], pages: Sequence[int], proofs: Sequence[bytes]
    ) -> list[bool | None]:
        """Reads as :meth:`read` does, but into pages of the device. For each page: whether it came with the given proof; None
        where the source's device does not have it."""
        ...

    def fill(self, pages: Sequence[int], contents: Sequence[memoryview]) -> None:
        """Fills pages of the device from the host's memory."""
        ...

    def barrier(self) -> Callable[[], None]:
        """A function that returns once everything is over that was launched before now."""
        ...


@dataclass(slots=True, eq=False)
class _Landed(HostPage):
    """A page that is being filled, or was, with the steps that were launched before."""

    after: int = 0
    barrier: Callable[[], None] = lambda: None


class Prompt(NamedTuple):
    """A request's tokens that may come from the cache, within which namespace, and their pages."""

    token_ids: array[int]
    namespace: bytes
    pages: list[PageName]


class LandingDevice(Protocol):
    """The device's pages, as the tiers know them.

    Attributes:
        room: What pages are taken from; there before the first is.
        steps: Returns how many steps were launched, and how many of them have ended.
    """

    room: DeviceRoom
    steps: Callable[[], tuple[int, int]]

    def is_storing(self, page: int) -> bool:
        """Whether what a page holds, or held, is being copied."""
        ...


class Landing:
    """The ledger of such pages. Single-threaded but for :meth:`read`.

    Args:
        device: The device's pages.
        num_pages: How many there are.
        page_bytes: Bytes of a page's content.
        fingerprint: What pages hold besides tokens.
        mover: Reads.

    Attributes:
        batch, early_reads: As :class:`~sapwood_worker.core.cache.handoff.pulls.Ground` has it.
        num_pages, page_bytes: The arguments.
        parts: Counts what came of pages before all of their layers were computed.
    """

    batch, early_reads = _BATCH, 1

    def __init__(
        self, device: LandingDevice, num_pages: int, page_bytes: int, fingerprint: bytes, mover: DeviceMover
    ) -> None:
        self._device = device
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self.parts = mover.parts
        self._fingerprint = fingerprint
        self._mover = mover
        self._entries: dict[bytes, _Landed] = {}
        self._prompts: dict[int, Prompt] = {}

    @property
    def room(self) -> int:
        """How many pages could be reserved now."""
        return self._device.room.num_takable

    def reaches(self, ticket: HandoffTicket) -> bool:
        """As :meth:`DeviceMover.reaches`."""
        return self._mover.reaches(ticket)

    def expect(self, serial: int, prompt: Prompt) -> None:
        """Notes which prompt a request has."""
        self._prompts[serial] = prompt

    def forget(self, serial: int) -> None:
        """A request has started or ended."""
        self._prompts.pop(serial, None)

    def released(self, serial: int, wanted: Sequence[PageKey]) -> bool:
        """A request waits no longer: shares what has come of its prompt; returns whether all that it wanted is cached now."""
        prompt = self._prompts[serial]
        keys = [page.key for page in prompt.pages]

        def filled(index: int) -> int | None:
            entry = self._find(keys[index]) if index < len(keys) else None
            return None if entry is None else self._entries.pop(entry.key.hash).page

        cached = self._device.room.adopt(prompt, filled)
        return not wanted or keys.index(wanted[-1]) < cached

    def reserve(self, wanted: Sequence[PageName]) -> list[HostPage]:
        """As :meth:`HostPages.reserve`."""
        new = {name.key.hash: name for name in wanted if name.key.hash not in self._entries}
        pages = self._device.room.take(len(new)).tolist()
        (launched, _), barrier = self._device.steps(), self._mover.barrier()
        taken = [_Landed(name, page, after=launched, barrier=barrier) for name, page in zip(new.values(), pages)]  # noqa: B905 - there may be fewer pages
        self._entries.update((entry.key.hash, entry) for entry in taken)
        return list(taken)

    def written(self, entries: Sequence[HostPage]) -> None:
        """As :meth:`HostPages.written`."""
        for entry in entries:
            entry.ready = True

    def abandon(self, entries: Sequence[HostPage]) -> None:
        """As :meth:`HostPages.abandon`."""
        self._drop(entries)

    def pin(self, entries: Sequence[HostPage]) -> None:
        """As :meth:`HostPages.pin`."""
        for entry in entries:
            entry.pins += 1

    def unpin(self, entries: Sequence[HostPage]) -> None:
        """Takes one pin back from each; what nobody needs any more is given back, unless it is shared."""
        for entry in entries:
            entry.pins -= 1
        self._drop(entry for entry in entries if not entry.pins and self._entries.get(entry.key.hash) is entry)

    def writable(self, entries: Sequence[HostPage]) -> bool:
        """Whether nothing that the scheduler knows of uses what these pages held."""
        _, ended = self._device.steps()
        return all(self._entry(each).after <= ended and not self._device.is_storing(each.page) for each in entries)

    def read(self, ticket: HandoffTicket, indices: Sequence[int], entries: Sequence[HostPage]) -> list[bool]:
        """Reads pages of a ticket; returns which are what it says. Called from several threads."""
        for barrier in {self._entry(each).barrier for each in entries}:
            barrier()
        proofs = [entry.key.proof for entry in entries]
        found = self._mover.read_to_device(ticket, indices, [entry.page for entry in entries], proofs)
        left = [place for place, there in enumerate(found) if there is None]
        for start in range(0, len(left), _THROUGH_HOST):
            self._read_through_host(ticket, indices, entries, left[start : start + _THROUGH_HOST], found)
        return list(map(bool, found))

    def _read_through_host(
        self,
        ticket: HandoffTicket,
        indices: Sequence[int],
        entries: Sequence[HostPage],
        places: Sequence[int],
        found: list[bool | None],
    ) -> None:
        """Reads those at some places of a read by way of the host's memory; sets which are what the ticket says."""
        records = [memoryview(np.empty(HEADER_BYTES + self.page_bytes, np.uint8).data) for _ in places]
        read = self._mover.read(ticket, [indices[place] for place in places], records)
        namespace = self._fingerprint.hex()
        good = {
            place: record[HEADER_BYTES:]
            for place, there, record in zip(places, read, records, strict=True)
            if there and verify(record, entries[place].key, namespace)
        }
        self._mover.fill([entries[place].page for place in good], list(good.values()))
        for place in places:
            found[place] = place in good

    def check(self, pins: Mapping[int, int]) -> None:
        """Compares what is taken with how often each page is pinned; for tests.

        Raises:
            AssertionError: They disagree.
        """
        pages = {entry.page: entry for entry in self._entries.values()}
        assert len(pages) == len(self._entries), "a page is filled twice"
        ready = {page: entry.pins for page, entry in pages.items() if entry.ready}
        assert all(0 < count <= pins.get(page, 0) for page, count in ready.items()), "a page waits for nobody"
        assert pages.keys() == self._device.room.taken, "a page was taken and is not filled"

    def _find(self, key: PageKey) -> _Landed | None:
        entry = self._entries.get(key.hash)
        return entry if entry is not None and entry.ready and entry.key.proof == key.proof else None

    def _entry(self, entry: HostPage) -> _Landed:
        assert isinstance(entry, _Landed)
        return entry

    def _drop(self, entries: Iterable[HostPage]) -> None:
        gone = list(entries)
        for entry in gone:
            del self._entries[entry.key.hash]
        self._device.room.give_back([entry.page for entry in gone])
