"""The tiers below the device's pages: decides which pages are copied where, and when.

The radix tree is the first tier. The tree reports to this module which pages enter and leave it; this module keeps the key of
each page. A page is copied to the second tier (host memory) when it is cached (``write_through``), when it is used a second time
(``write_through_selective``) or when it is evicted (``write_back``). When a request starts, pages of its prompt that only the
second tier has are copied back before the step computes.

The copies go out with the step (:class:`Copies`), and the runner carries them out. A copy to the host may end several steps
later; a copy back ends before its step computes. Three rules keep outputs right:

- A page is found in the second tier only after its copy there is reported done, and only under its exact key.
- A device page that leaves the tree while it is being stored raises the *fence*: the step that may overwrite it waits.
- Host pages that a load reads are pinned from the match to the end of the load's step.

Complexity: O(pages of the request) when a row opens or its pages are cached, O(1) for each page evicted.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from sapwood_worker.core.cache.host import Batch, HostPage, HostPages, HostStores, check_host
from sapwood_worker.core.cache.lower_tiers import TierCounters
from sapwood_worker.core.cache.page_key import KvEventLog, PageChain, PageKey, PageName, PictureNames
from sapwood_worker.core.cache.pages import WindowPages
from sapwood_worker.core.cache.storage.tier import StorageTier
from sapwood_worker.core.cache.transfer.leases import TransferLeases
from sapwood_worker.core.cache.transfer.reads import DeviceRoom, Prompt, TransferReceiver
from sapwood_worker.records.handoff import HandoffTicket
from sapwood_worker.records.step import NOT_REPORTED, CacheLoad, Copies, CopyReport, LatePages, PageCopy, PageIds

WritePolicy = Literal["write_through", "write_through_selective", "write_back"]

_SELECTIVE_HITS = 2
"""How often a page must have been used, its computation included, before ``write_through_selective`` stores it."""


@dataclass(slots=True)
class _Row:
    """The state of a running request: its keys so far, and the host pages that are kept for it or being loaded."""

    chain: PageChain
    found: list[HostPage]


class HierarchicalCache:
    """Implements :class:`~sapwood_worker.core.cache.lower_tiers.LowerTiers`. Lives in the scheduler; single-threaded.

    Args:
        host: The second tier.
        num_device_pages: Pages of the first tier.
        page_size: Tokens in a page.
        policy: When pages are copied to the second tier.
        storage: The third tier; None: there cannot be one.
        leases: Keeps pages for other workers; None: this worker offers no KV transfers.
        reads: Reads pages from other workers; None: this worker reads none.

    Attributes:
        host: The second tier.
        storage: The third tier.
        leases, reads: The arguments; may be set later, when the worker's role changes.
        counters: What has happened so far.
        pictures: The names of pictures in tokens.
        room: Gives device pages that a KV transfer will fill.
        steps: Returns how many steps were launched, and how many of them have ended.
    """

    room: DeviceRoom
    steps: Callable[[], tuple[int, int]]

    def __init__(
        self,
        host: HostPages,
        num_device_pages: int,
        page_size: int,
        policy: WritePolicy = "write_through",
        storage: StorageTier | None = None,
        leases: TransferLeases | None = None,
        reads: TransferReceiver | None = None,
    ) -> None:
        self.host = host
        self.storage = storage
        self.leases = leases
        self.reads = reads
        self.counters = TierCounters()
        self.pictures = PictureNames()
        self._page_size = page_size
        self._policy: WritePolicy = policy
        self._threshold = {"write_through": 1, "write_through_selective": _SELECTIVE_HITS}.get(policy)
        # For each page of the tree, its content and how often it was used; undefined for other pages.
        self._names: list[PageName | None] = [None] * num_device_pages
        self._wanted = np.zeros(num_device_pages, np.int32)
        self._rows: dict[int, _Row] = {}
        self._stores = HostStores()
        self._during: FilledPages | None = None
        self._adopted = AdoptedPages()
        self._loads: list[tuple[PageIds, list[HostPage]]] = []
        self._started: list[CacheLoad] = []
        self._given = 0
        self._fence = False
        self._windows: Sequence[WindowPages] = ()

    @property
    def busy(self) -> bool:
        """Whether copies wait to be taken, or the ends of stores, third-tier calls or reads from other workers wait to be
        reported."""
        passing = (self.reads is not None and self.reads.busy) or (self.leases is not None and self.leases.offering)
        return self._copying or passing or (self.storage is not None and self.storage.busy)

    @property
    def _copying(self) -> bool:
        waiting = self._stores.busy or self._during or self._loads or self._adopted.pages
        return bool(waiting)

    def announce(self, events: KvEventLog) -> None:
        """Has ``events`` record what enters and leaves these tiers; called while they are empty."""
        self.host.announce(events)
        if self.storage is not None:
            self.storage.known.announce(events)

    def queued(
        self, serial: int, token_ids: array[int], namespace: bytes, cached: int, ticket: HandoffTicket | None = None
    ) -> bool:
        """For an accepted request, looks up pages that the first two tiers lack: in the third tier, or at the worker named in its
        ticket.

        Args:
            serial: The request.
            token_ids: All of its tokens that may come from the cache.
            namespace: Within which to look.
            cached: How many of the pages the first tier has.
            ticket: The ticket for the request's pages that another worker keeps.

        Returns:
            Whether it is to wait until :meth:`poll` names it.
        """
        storage = self.storage if self.storage is not None and self.storage.connection is not None else None
        reads = self.reads if ticket is not None else None
        if storage is None and reads is None:
            return False
        chain = PageChain(namespace, self._page_size, names=self.pictures)
        if ticket is not None and reads is not None:
            chain.resume(reads.announced_pages(ticket), token_ids)
        chain.extend(token_ids, len(token_ids))
        found = self.host.match(chain.keys[cached:])
        self.host.touch(found)
        if ticket is not None and reads is not None:
            return reads.start(serial, Prompt(token_ids, namespace, chain.pages), cached, len(found), ticket)
        return storage is not None and storage.prefetch(serial, chain.pages[cached + len(found) :])

    def keys(self, prompt: array[int], namespace: bytes) -> list[PageKey]:
        """The keys of the whole pages of a prompt."""
        chain = PageChain(namespace, self._page_size, names=self.pictures)
        chain.extend(prompt, len(prompt))
        return chain.keys

    def announced(self, ticket: HandoffTicket, prompt: array[int], namespace: bytes, cached: int) -> None:
        """Begins to read pages that another worker keeps for a request that will probably arrive.

        Args:
            ticket: For some of its prompt's pages.
            prompt: Its tokens; empty if an earlier call for the same transfer had them.
            namespace: Within which to look.
            cached: How many of the pages the first tier has.
        """
        if self.reads is not None:
            chain = PageChain(namespace, self._page_size, names=self.pictures)
            chain.extend(prompt, len(prompt))
            found = len(self.host.match(chain.keys[cached : cached + 1]))
            self.reads.announced(ticket, chain.pages, cached, found)

    def settle(self, serial: int) -> None:
        """Releases the pages that were kept for a request that has started (after its last :meth:`load`) or ended."""
        fetched = None if self.reads is None else self.reads.settle(serial)
        if fetched is None and self.storage is not None:
            fetched = self.storage.arrivals.settle(serial)
        if self._given:
            self._started.append(CacheLoad(serial, self._given, *(fetched or ())))
        self._given = 0

    def poll(self) -> list[int]:
        """Collects finished work of the third tier and other workers; returns the requests that no longer wait for it.
        Never blocks."""
        released = [] if self.storage is None else self.storage.poll()
        return released if self.reads is None else released + self.reads.poll()

    def wait(self, seconds: float) -> None:
        """Waits until the third tier or another worker has something for the next step, or the given seconds are over."""
        if self.storage is not None and self.storage.busy:
            self.storage.wait(seconds)
        elif self.reads is not None and self.reads.busy:
            self.reads.wait(seconds)
        else:
            time.sleep(seconds)

    def open(self, slot: int, token_ids: array[int], namespace: bytes, pages: PageIds) -> None:
        known = list(map(self._name, pages.tolist()))
        chain = PageChain(namespace, self._page_size, list(known), self.pictures)
        chain.extend(token_ids, len(token_ids))
        found = self.host.match(chain.keys[len(known) :])
        self.host.pin(found)
        above = [entry for name in known if (entry := self.host.find(name.key)) is not None]
        self.host.touch(above + found)
        self._rows[slot] = _Row(chain, found)
        self._wanted[pages] += 1
        if self._threshold is not None and len(above) < len(known):
            self._store(pages[self._wanted[pages] >= self._threshold])
        self.counters.device_hits += len(known)
        self.counters.host_hits += len(found)

    def beside(self, windows: Sequence[WindowPages], epoch_of: Callable[[int], int], room: DeviceRoom) -> None:
        self._windows, self._stores.epoch_of, self.room = windows, epoch_of, room

    def device_epoch(self, page: int) -> int:
        """How often a device page has been allocated. May be called from any thread."""
        return self._stores.epoch_of(page)

    def is_storing(self, page: int) -> bool:
        """Whether the present or former content of a device page is being copied."""
        return self._stores.is_storing(page)

    def kept(self, slot: int) -> int:
        self._given = len(self._rows[slot].found)
        return self._given

    def load(self, slot: int, pages: PageIds, windows: tuple[PageIds, ...]) -> None:
        self._loads.append((np.stack((pages, *windows)), self._rows[slot].found))

    def loaded(self, slot: int) -> None:
        row = self._rows[slot]
        self.host.unpin(row.found)
        row.found = []

    def cached(self, slot: int, token_ids: array[int], start: int, pages: PageIds, new: PageIds) -> None:
        chain = self._rows[slot].chain
        chain.extend(token_ids, (start + len(pages)) * self._page_size)
        self._cached(chain.pages[start:], pages, new)
        if self._threshold == 1:
            self._store(new)

    def adopted(self, names: Sequence[PageName], pages: PageIds) -> None:
        self._cached(names, pages, pages)
        if self._threshold == 1:
            self._adopted.add(pages)

    def _cached(self, names: Sequence[PageName], pages: PageIds, new: PageIds) -> None:
        for page, name in zip(pages.tolist(), names, strict=False):
            self._names[page] = name
        self._wanted[new] = 1

    def computes(self, slot: int, serial: int, prompt: array[int], first: int, pages: PageIds) -> None:
        """For a prompt that is transferred, copies the pages that the coming step completes to the second tier, layer by layer
        while the step computes, so that other workers can read them. Host pages for them are reserved after the launch of the
        step.

        Args:
            slot, serial, prompt: The prompt's row, its request, all of its tokens.
            first, pages: The first of these pages, and all of them on the device: int32 [1 + windows, n].
        """
        assert self.leases is not None, "the worker hands nothing off"
        if self._during is None:
            self._during = FilledPages(self.host, self._stores, self.leases)
        self._during.add(ChunkPages(serial, self._rows[slot].chain, prompt, first, pages))

    def computed(self, during: LatePages) -> None:
        """Notes that a step is over: the device pages that it filled can be read."""
        if (batch := self._stores.during(during)) is not None:
            for entry in batch.host:
                entry.computed = True

    def close(self, slot: int) -> None:
        self.host.unpin(self._rows.pop(slot).found)

    def evicted(self, pages: PageIds) -> None:
        if self._policy == "write_back":
            self._store(pages)
        self.dropped(pages)

    def dropped(self, pages: PageIds) -> None:
        self._adopted.forget(pages)
        self._fence = self._fence or self._stores.is_storing_any(pages)

    def clear_host(self) -> None:
        """Forgets all pages of the second tier, and those being copied there from the device."""
        self._lose(self._stores.forget())
        self.host.clear()

    def take(self) -> Copies | None:
        """The copies of the coming step; None if there is nothing to copy and no store to wait for."""
        if not self._copying:
            return None
        if self._adopted.pages:
            self._store(self._adopted.take())
        loads, self._loads = self._loads, []
        started, self._started = self._started, []
        fence, self._fence = self._fence, False
        during, self._during = self._during, None
        self.counters.fences += fence
        return Copies(self._stores.begin_waiting(), _load_copy(loads), fence, tuple(started), during)

    def ended(self, report: CopyReport) -> None:
        """Takes the runner's report of copies that have ended."""
        self.counters.store_seconds += report.store_seconds
        self.counters.load_seconds += report.load_seconds
        for number in report.done:
            batch = self._stores.end(number)
            if batch.unwanted:
                self._lose(batch.host)
                continue
            self.host.written(batch.host)
            self.counters.stored += len(batch.host)
            if self.storage is not None:
                self.storage.write(batch.host)
        for number in report.failed:
            failed = self._stores.end(number).host
            self.counters.store_failures += len(failed)
            self._lose(failed)

    def failed(self, during: LatePages) -> None:
        """Drops the pages that were copied while a failed step ran."""
        if (batch := self._stores.during(during)) is not None:
            batch.unwanted = True

    def _lose(self, entries: list[HostPage]) -> None:
        if self.leases is not None and any(entry.coming for entry in entries):
            self.leases.lost(entries)
        self.host.abandon(entries)

    def check(self) -> None:
        """Checks that all its records agree; for tests.

        Raises:
            AssertionError: They do not.
        """
        pins = Counter({} if self.storage is None else self.storage.check())
        fetching = 0 if self.storage is None else self.storage.arrivals.reading
        fetching += 0 if self.reads is None else self.reads.host.arrivals.reading
        for passing in (self.leases, self.reads):
            pins.update({} if passing is None else passing.pins())
        putting = 0 if self.storage is None else self.storage.writing
        pins.update(entry.page for row in self._rows.values() for entry in row.found)
        check_host(self.host, self._stores.check(), fetching, pins, putting)

    def _name(self, page: int) -> PageName:
        known = self._names[page]
        assert known is not None, f"page {page} is cached, but nobody said so"
        return known

    def _store(self, pages: PageIds) -> None:
        """Queues copies of those of the tree's ``pages`` that the second tier lacks and whose window pages all exist."""
        for window in self._windows:
            pages = pages[window.beside(pages) >= 0]
        place = {self._name(page).key: page for page in pages.tolist() if page not in self._adopted.pages}
        wanted = [self._name(page) for key, page in place.items() if not self.host.has(key)]
        reserved = self.host.reserve(wanted)
        self.counters.no_room += len(wanted) - len(reserved)
        readable = self.leases is not None and self.leases.in_parts > 0  # from the device, while it is copied
        for entry in reserved:
            page = place[entry.key]
            entry.coming = entry.computed = readable
            self._stores.add(self._stores.waiting, entry, page, [window.page_beside(page) for window in self._windows])


def _load_copy(loads: Sequence[tuple[PageIds, list[HostPage]]]) -> PageCopy | None:
    """Makes one copy of all loads: device pages, int32 [1 + windows, n], and the host entries that fill them."""
    if not loads:
        return None
    device, *windows = np.concatenate([pages for pages, _ in loads], 1)
    host = np.array([entry.page for _, entries in loads for entry in entries], np.int32)
    return PageCopy(NOT_REPORTED, device, host, tuple(windows))


# Pages read from other workers that are cached on the device and not stored in host memory yet. Each step stores some, except
# the step that begins their request. To launch all of their copies at once would delay its first token, and those that others
# wait for.
_A_STEP = 64


class AdoptedPages:
    """The pages.

    Attributes:
        pages: For each page, in order, whether it came after the last step was planned.
    """

    def __init__(self) -> None:
        self.pages: dict[int, bool] = {}

    def add(self, pages: PageIds) -> None:
        """Pages have come."""
        self.pages.update(dict.fromkeys(pages.tolist(), True))

    def forget(self, pages: PageIds) -> None:
        """Pages are about to be given to another owner."""
        for page in pages.tolist() if self.pages else ():
            self.pages.pop(page, None)

    def take(self) -> PageIds:
        """Removes and returns the pages to store with the coming step."""
        due = np.array([page for page, new in self.pages.items() if not new][:_A_STEP], np.int32)
        self.pages = dict.fromkeys(self.pages, False)
        self.forget(due)
        return due


# Pages of transferred prompts that a step fills. They are copied to the second tier while the step computes, layer by layer,
# and other workers read them there.
# To hash the pages and to reserve host pages takes milliseconds. It is done after the launch of the step, so that
# the device does not wait for it.
class ChunkPages(NamedTuple):
    """Pages of one prompt.

    Attributes:
        serial: The request.
        chain: The names of its pages so far.
        prompt: All of its tokens.
        first: The first of these pages.
        pages: int32 [1 + windows, n]: the device pages.
    """

    serial: int
    chain: PageChain
    prompt: array[int]
    first: int
    pages: PageIds


class FilledPages:
    """Implements :class:`~sapwood_worker.records.step.LatePages`.

    Args:
        host: The second tier.
        stores: The copies to it.
        leases: Offers the pages to other workers.

    Attributes:
        chosen: The copy of all pages that found room; None: no page found room, or not decided yet.
    """

    def __init__(self, host: HostPages, stores: HostStores, leases: TransferLeases) -> None:
        self._host = host
        self._stores = stores
        self._leases = leases
        self._chunks: list[ChunkPages] = []
        self._taken = False
        self.chosen: PageCopy | None = None

    def add(self, chunk: ChunkPages) -> None:
        """Adds pages of one more prompt."""
        self._chunks.append(chunk)

    def take(self) -> PageCopy | None:
        if not self._taken:
            self._taken = True
            self.chosen = self._store()
            self._chunks = []
        return self.chosen

    def _store(self) -> PageCopy | None:
        batch = Batch()
        for serial, chain, prompt, first, pages in self._chunks:
            chain.extend(prompt, len(prompt))
            self._leases.offer_pages(serial, chain.keys)
            names = chain.pages[first : first + pages.shape[1]]
            place = {name.key: index for index, name in enumerate(names)}
            for entry in self._host.reserve(names):
                page, *windows = pages[:, place[entry.key]].tolist()
                entry.coming = True
                self._stores.add(batch, entry, page, windows)
        return self._stores.begin(batch)
