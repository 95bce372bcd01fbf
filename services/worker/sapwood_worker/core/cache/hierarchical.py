"""The tiers below the device's pages: decides which pages are copied where, and when.

The radix tree is the first tier. This module is told what enters and leaves the tree, and keeps the key of each page. A page goes
to the second tier (host memory) when it is cached (``write_through``), when it was asked for a second time
(``write_through_selective``) or when it is evicted (``write_back``). When a request starts, the pages of its prompt that the
second tier has and the tree has not are copied back before the step computes.

The copies go out with the step (:class:`Copies`), and the runner carries them out. A copy to the host may end steps later; a
copy back is in place for the step that it goes with. Three rules keep tokens right:

- A page is found in the second tier only when its store is reported done, and only under its exact key.
- A device page that leaves the tree while it is being stored raises the *fence*: the step that may overwrite it waits.
- Pages that a load reads are pinned from the match to the end of its step.

Complexity: O(pages of the request) when a row opens or its pages are cached, O(1) for each page evicted.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sapwood_worker.core.cache.handoff.adopted_pages import AdoptedPages
from sapwood_worker.core.cache.handoff.filled_pages import ChunkPages, FilledPages
from sapwood_worker.core.cache.handoff.landing import DeviceRoom, Prompt
from sapwood_worker.core.cache.handoff.leases import HandoffLeases
from sapwood_worker.core.cache.handoff.takeover import Takeover
from sapwood_worker.core.cache.host.host_pages import HostPage, HostPages, PagesToStore
from sapwood_worker.core.cache.kv_event_log import KvEventLog
from sapwood_worker.core.cache.lower_tiers import TierCounters
from sapwood_worker.core.cache.page_key import PageChain, PageName
from sapwood_worker.core.cache.prefix_checks import check_host
from sapwood_worker.core.cache.storage.tier import StorageTier
from sapwood_worker.core.cache.window_pages import WindowPages
from sapwood_worker.records.handoff import HandoffTicket
from sapwood_worker.records.page_copies import CacheLoad, Copies, CopyReport, LatePages, PageCopy, PageIds

WritePolicy = Literal["write_through", "write_through_selective", "write_back"]

_SELECTIVE_HITS = 2
"""How often a page must have been used, its computation included, before ``write_through_selective`` stores it."""


@dataclass(slots=True)
class _Row:
    """What is known of a running request: its keys so far and the host pages that are kept for it or being loaded."""

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
        leases: Keeps pages for other workers; None: this one hands nothing off.
        pulls: Brings pages from other workers; None: this one takes nothing over.

    Attributes:
        host: The second tier.
        storage: The third tier.
        leases, pulls: The arguments; may be set later, when the worker's role changes.
        counters: What has happened so far.
        device_epoch: How often a device page has been allocated. May be called from any thread.
        room: Gives device pages that are to be filled from elsewhere.
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
        leases: HandoffLeases | None = None,
        pulls: Takeover | None = None,
    ) -> None:
        self.host = host
        self.storage = storage
        self.leases = leases
        self.pulls = pulls
        self.counters = TierCounters()
        self._page_size = page_size
        self._policy: WritePolicy = policy
        self._threshold = {"write_through": 1, "write_through_selective": _SELECTIVE_HITS}.get(policy)
        # What each page of the tree holds, and how often it was wanted; undefined for other pages.
        self._names: list[PageName | None] = [None] * num_device_pages
        self._wanted = np.zeros(num_device_pages, np.int32)
        self._rows: dict[int, _Row] = {}
        self._next = PagesToStore()
        self._during: FilledPages | None = None
        self._adopted = AdoptedPages()
        self._loads: list[tuple[PageIds, list[HostPage]]] = []
        self._started: list[CacheLoad] = []
        self._given = 0
        self._fence = False
        self._stores: dict[int, PagesToStore] = {}
        self._storing: Counter[int] = Counter()
        self._numbers = 0
        self._windows: Sequence[WindowPages] = ()
        self.device_epoch: Callable[[int], int] = lambda page: 0

    @property
    def busy(self) -> bool:
        """Whether copies wait to be taken, or stores, the third tier's calls or other workers' pages to be reported."""
        passing = (self.pulls is not None and self.pulls.busy) or (self.leases is not None and self.leases.offering)
        return self._copying or passing or (self.storage is not None and self.storage.busy)

    @property
    def _copying(self) -> bool:
        waiting = self._next.device or self._during or self._loads or self._stores or self._adopted.pages
        return bool(waiting)

    def announce(self, events: KvEventLog) -> None:
        """Has ``events`` record what enters and leaves these tiers; called while they are empty."""
        self.host.announce(events)
        if self.storage is not None:
            self.storage.known.announce(events)

    def queued(
        self, serial: int, token_ids: array[int], namespace: bytes, cached: int, ticket: HandoffTicket | None = None
    ) -> bool:
        """Looks in the third tier, or where its ticket says, for what the first two lack of a request that has been let in.

        Args:
            serial: The request.
            token_ids: All of its tokens that may come from the cache.
            namespace: Within which to look.
            cached: Pages of it that the first tier has.
            ticket: For pages of it that another worker keeps.

        Returns:
            Whether it is to wait until :meth:`poll` names it.
        """
        storage = self.storage if self.storage is not None and self.storage.connection is not None else None
        pulls = self.pulls if ticket is not None else None
        if storage is None and pulls is None:
            return False
        chain = PageChain(namespace, self._page_size)
        if ticket is not None and pulls is not None:
            chain.resume(pulls.announced_pages(ticket), token_ids)
        chain.extend(token_ids, len(token_ids))
        found = self.host.match(chain.keys[cached:])
        self.host.touch(found)
        if ticket is not None and pulls is not None:
            return pulls.pull(serial, Prompt(token_ids, namespace, chain.pages), cached, len(found), ticket)
        return storage is not None and storage.prefetch(serial, chain.pages[cached + len(found) :])

    def announced(self, ticket: HandoffTicket, prompt: array[int], namespace: bytes, cached: int) -> None:
        """Has pages read that another worker keeps for a request which is likely to come.

        Args:
            ticket: For some of its prompt's pages.
            prompt: Its tokens; empty if an earlier call for the same transfer had them.
            namespace: Within which to look.
            cached: Pages of it that the first tier has.
        """
        if self.pulls is not None:
            chain = PageChain(namespace, self._page_size)
            chain.extend(prompt, len(prompt))
            found = len(self.host.match(chain.keys[cached : cached + 1]))
            self.pulls.announced(ticket, chain.pages, cached, found)

    def settle(self, serial: int) -> None:
        """Frees what was kept for a request that has started (its :meth:`load` was the last) or ended before."""
        fetched = None if self.pulls is None else self.pulls.settle(serial)
        if fetched is None and self.storage is not None:
            fetched = self.storage.arrivals.settle(serial)
        if self._given:
            self._started.append(CacheLoad(serial, self._given, *(fetched or ())))
        self._given = 0

    def poll(self) -> list[int]:
        """Takes what the third tier and other workers have done; returns the requests that need not wait for them any longer.
        Never blocks."""
        released = [] if self.storage is None else self.storage.poll()
        return released if self.pulls is None else released + self.pulls.poll()

    def wait(self, seconds: float) -> None:
        """Returns when the third tier or another worker has something for the next step, or after so many seconds."""
        if self.storage is not None and self.storage.busy:
            self.storage.wait(seconds)
        elif self.pulls is not None and self.pulls.busy:
            self.pulls.wait(seconds)
        else:
            time.sleep(seconds)

    def open(self, slot: int, token_ids: array[int], namespace: bytes, pages: PageIds) -> None:
        known = list(map(self._name, pages.tolist()))
        chain = PageChain(namespace, self._page_size, list(known))
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
        self._windows, self.device_epoch, self.room = windows, epoch_of, room

    def is_storing(self, page: int) -> bool:
        """Whether what a page of the device holds, or held, is being copied."""
        return page in self._storing

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
        """The coming step computes the last tokens of some pages of a prompt that is handed off: they go to the second tier while
        it does, layer by layer, and can be read so. That they do is looked after when the step has been launched.

        Args:
            slot, serial, prompt: The prompt's row, its request, all of its tokens.
            first, pages: The first of these pages, and all of them on the device: int32 [1 + windows, n].
        """
        if self._during is None:
            self._during = FilledPages(self._fill)
        self._during.add(serial, self._rows[slot].chain, prompt, first, pages)

    def _fill(self, filled: Sequence[ChunkPages]) -> PageCopy | None:
        """Has pages go to the second tier that the step fills which has been launched."""
        assert self.leases is not None
        store = PagesToStore()
        for serial, chain, prompt, first, pages in filled:
            chain.extend(prompt, len(prompt))
            self.leases.offer_pages(serial, chain.keys)
            names = chain.pages[first : first + pages.shape[1]]
            place = {name.key: index for index, name in enumerate(names)}
            for entry in self.host.reserve(names):
                page, *beside = pages[:, place[entry.key]].tolist()
                entry.coming = True
                self._stores_to(store, page, beside, entry)
        return self._begin(store)

    def computed(self, during: LatePages) -> None:
        """A step is over: the device's pages that it filled can be read."""
        if (copy := during.chosen) is not None and copy.number in self._stores:
            for entry in self._stores[copy.number].host:
                entry.computed = True

    def close(self, slot: int) -> None:
        self.host.unpin(self._rows.pop(slot).found)

    def evicted(self, pages: PageIds) -> None:
        if self._policy == "write_back":
            self._store(pages)
        self.dropped(pages)

    def dropped(self, pages: PageIds) -> None:
        self._adopted.forget(pages)
        if self._storing and not self._storing.keys().isdisjoint(pages.tolist()):
            self._fence = True

    def clear_host(self) -> None:
        """Forgets what the second tier has, and what is on its way there from the device."""
        store, self._next = self._next, PagesToStore()
        self._stop_storing(store)
        self._lose(store.host)
        self.host.clear()
        for store in self._stores.values():
            store.unwanted = True

    def take(self) -> Copies | None:
        """What the coming step has to copy; None if there is nothing to copy and no store to wait for."""
        if not self._copying:
            return None
        if self._adopted.pages:
            self._store(self._adopted.take())
        store, loads, started = self._next, self._loads, self._started
        self._next, self._loads, self._started = PagesToStore(), [], []
        fence, self._fence = self._fence, False
        self.counters.fences += fence
        stored = self._begin(store)
        during, self._during = self._during, None
        loaded = None
        if loads:
            device = np.concatenate([pages for pages, _ in loads], 1)
            loaded = self._copy(device, [each for _, row in loads for each in row])
        return Copies(stored, loaded, fence, tuple(started), during)

    def _begin(self, store: PagesToStore) -> PageCopy | None:
        if not store.device:
            return None
        device = np.array([[page, *beside] for page, beside in zip(store.device, store.windows, strict=True)])
        stored = self._copy(device.T.astype(np.int32), store.host)
        self._stores[stored.number] = store
        return stored

    def ended(self, report: CopyReport) -> None:
        """Takes the runner's report of copies that have ended."""
        self.counters.store_seconds += report.store_seconds
        self.counters.load_seconds += report.load_seconds
        for number in report.done:
            if self._stores[number].unwanted:
                self._abandon(number)
                continue
            self.host.written(entries := self._end(number))
            self.counters.stored += len(entries)
            if self.storage is not None:
                self.storage.write(entries)
        for number in report.failed:
            self.counters.store_failures += self._abandon(number)

    def failed(self, during: LatePages) -> None:
        """What was copied while a step ran is good for nothing."""
        if (copy := during.chosen) is not None and copy.number in self._stores:
            self._stores[copy.number].unwanted = True

    def _abandon(self, number: int) -> int:
        entries = self._end(number)
        self._lose(entries)
        return len(entries)

    def _lose(self, entries: list[HostPage]) -> None:
        if self.leases is not None and any(entry.coming for entry in entries):
            self.leases.lost(entries)
        self.host.abandon(entries)

    def check(self) -> None:
        """Checks that all its records agree; for tests.

        Raises:
            AssertionError: They do not.
        """
        stores = [*self._stores.values(), self._next]
        pins = Counter({} if self.storage is None else self.storage.check())
        fetching = 0 if self.storage is None else self.storage.arrivals.reading
        fetching += 0 if self.pulls is None else self.pulls.host.arrivals.reading
        for passing in (self.leases, self.pulls):
            pins.update({} if passing is None else passing.pins())
        putting = 0 if self.storage is None else self.storage.writing
        assert Counter(page for store in stores for page in store.device) == self._storing
        pins.update(entry.page for row in self._rows.values() for entry in row.found)
        check_host(self.host, {entry.page for store in stores for entry in store.host}, fetching, pins, putting)

    def _name(self, page: int) -> PageName:
        known = self._names[page]
        assert known is not None, f"page {page} is cached, but nobody said so"
        return known

    def _store(self, pages: PageIds) -> None:
        """Has those of ``pages``, which are the tree's, copied that the second tier lacks and that no window has lost."""
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
            self._stores_to(self._next, page, [window.page_beside(page) for window in self._windows], entry)

    def _stores_to(self, store: PagesToStore, page: int, beside: list[int], entry: HostPage) -> None:
        entry.device = page, self.device_epoch(page)
        store.add(page, beside, entry)
        self._storing[page] += 1

    def _end(self, number: int) -> list[HostPage]:
        store = self._stores.pop(number)
        self._stop_storing(store)
        return store.host

    def _stop_storing(self, store: PagesToStore) -> None:
        self._storing -= Counter(store.device)

    def _copy(self, device: PageIds, host: list[HostPage]) -> PageCopy:
        number, self._numbers = self._numbers, self._numbers + 1
        pages = np.array([entry.page for entry in host], np.int32)
        return PageCopy(number, device[0], pages, tuple(device[1:]))
