"""The prefix cache, its pins, and checks that tree, ledger and page table agree."""

from __future__ import annotations

import logging
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sapwood_common.errors import ResourceExhaustedError
from sapwood_worker.core.cache.eviction import EvictionName
from sapwood_worker.core.cache.lower_tiers import LowerTiers
from sapwood_worker.core.cache.page_key import KvEventLog, PictureNames
from sapwood_worker.core.cache.pages import (
    CACHE,
    FREE,
    TRANSFER,
    LedgerError,
    PageAllocator,
    PageHandle,
    PageIds,
    PageTable,
    WindowPages,
)
from sapwood_worker.core.cache.radix import TOKEN_BYTES, Match, Node, RadixTree
from sapwood_worker.core.cache.states import StateSnapshots
from sapwood_worker.core.cache.transfer.reads import Prompt
from sapwood_worker.records.kv_layout import StateSlots, WindowGroup

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Row:
    """An open row of the page table.

    Attributes:
        node: The locked end of its shared prefix.
        shared: Pages of that prefix.
        kept: Tokens whose keys and values were there when it was opened; those of them that are computed again are not written.
        loading: The pages that the tiers below are filling.
        windows: Those of each window.
        private: Whether no further page of it may be shared.
        part: The tree's part of the page after the shared ones, which the row goes on to write; locked. None: that page is the
            row's alone.
        source: The locked node of the page that the row's first own page is to be a copy of. None: it is no copy, or the copy is
            made.
        copied: How many tokens of that page are the row's.
        held: The window pages of ``source``.
    """

    node: Node
    shared: int
    kept: int = 0
    loading: PageHandle | None = None
    windows: tuple[PageIds, ...] = ()
    private: bool = False
    part: Node | None = None
    source: Node | None = None
    copied: int = 0
    held: tuple[PageIds, ...] = ()

    @property
    def in_tree(self) -> int:
        """Its first pages that the tree has."""
        return self.shared + (self.part is not None)

    @property
    def arriving(self) -> bool:
        """Whether pages of it are filled by a step that has not ended."""
        return self.loading is not None or self.source is not None


def check_idle(
    allocator: PageAllocator,
    tree: RadixTree,
    pins: Pins,
    rows: Mapping[int, Row],
    windows: Sequence[WindowPages],
    taken: int,
    states: StateSnapshots | None,
) -> None:
    """Checks that nothing but ``taken`` pages is held while no row is open; vectorised, O(pages).

    Raises:
        AssertionError: A page leaked or a lock was left behind; the message names the requests.
    """
    allocator.check()
    assert not rows, f"rows {sorted(rows)} are open, though nothing runs"
    nodes = pins.nodes()
    pinned = sum(len(node.pages) for node in nodes)
    if tree.num_evictable + pinned != tree.num_pages:
        locked = [node.pages for node in tree.nodes() if node.locks and node not in nodes]
        raise LedgerError(f"a lock was left behind on pages {allocator.describe(np.concatenate(locked))}")
    if allocator.num_used != tree.num_pages + taken:
        cached = np.concatenate([np.empty(0, np.int32), *(node.pages for node in tree.nodes())])
        leaked = np.setdiff1d(allocator.used(), cached)
        raise LedgerError(f"nothing runs, yet there are pages {allocator.describe(leaked)}")
    for nth, window in enumerate(windows):
        window.check_idle(sum(map(len, pins.held(nth))))
    if states is not None:
        states.check_idle(sum(map(len, pins.held(len(windows)))))


def check_pages(
    allocator: PageAllocator,
    table: PageTable,
    tree: RadixTree,
    pins: Pins,
    rows: Mapping[int, Row],
    windows: Sequence[WindowPages],
    taken: Sequence[int],
    states: StateSnapshots | None,
) -> None:
    """Compares tree, ledger, rows and the pages that are taken, page by page; for tests.

    Raises:
        AssertionError: They disagree.
    """
    ends: dict[Node, int] = {}
    owners = np.full(allocator.num_pages, FREE, dtype=np.int32)
    held = 0
    for slot, row in rows.items():
        ends[row.node] = ends.get(row.node, 0) + 1
        pages = table.pages(slot)
        at: Node | None = row.node
        end = row.shared
        while at is not None and at.parent is not None:
            start = end - len(at.pages)
            assert start >= 0 and (pages[start:end] == at.pages).all(), f"row {slot} does not begin with its prefix"
            end, at = start, at.parent
        assert end == 0, f"row {slot} does not begin with the prefix it locks"
        loading = pages[:0] if row.loading is None else row.loading.pages
        loaded = row.in_tree + len(loading)
        assert (pages[row.in_tree : loaded] == loading).all(), f"row {slot} is not filled where it should be"
        owners[loading] = TRANSFER
        owners[pages[loaded:]] = slot
        held += len(pages) - row.in_tree
        for node in (row.part, row.source):
            if node is not None:
                ends[node] = ends.get(node, 0) + 1
        if row.part is not None:
            assert row.part.parent is row.node and row.part.pages[0] == pages[row.shared], (
                f"row {slot} has another part"
            )
    for node in pins.ends():
        ends[node] = ends.get(node, 0) + 1
    cached = tree.check(ends)
    owners[cached] = CACHE
    owners[taken] = TRANSFER
    # The counts agree too, so that no page stands in two places.
    allocator.check_owners(owners, held + len(cached) + len(taken))
    begun = {slot: table.pages(slot)[: row.in_tree] for slot, row in rows.items()}
    for nth, window in enumerate(windows):
        moving = {slot: each[each >= 0] for slot, row in rows.items() for each in row.windows[nth : nth + 1]}
        copied = [each for row in rows.values() for each in row.held[nth : nth + 1]]
        window.check(begun, moving, pins.held(nth) + copied, cached)
    if states is not None:
        states.check(pins.held(len(windows)), cached)


# Pinned prefixes: locked in the tree, with their window pages, until they are unpinned.


@dataclass(frozen=True, slots=True)
class _Pin:
    """The locked end of a pinned prefix, the end of its time, its pages in each window, and the snapshot of its state."""

    node: Node
    until: float | None
    held: tuple[PageIds, ...]


class Pins:
    """The pinned prefixes of one tree.

    Args:
        tree: Has their pages.
        windows: The pages of layers that see a window only, and the snapshots of states.
        scarce: Those windows that have fewer pages than the page table.
    """

    def __init__(
        self, tree: RadixTree, windows: Sequence[WindowPages | StateSnapshots], scarce: Sequence[WindowPages]
    ) -> None:
        self._tree = tree
        self._windows = windows
        self._scarce = scarce
        self._pins: dict[str, _Pin] = {}

    def __len__(self) -> int:
        return len(self._pins)

    def add(self, name: str, match: Match, most: int, until: float | None) -> None:
        """Pins a prefix; a pin of the same name is replaced.

        Args:
            name: The pin's.
            match: The prefix.
            most: Pages that may be pinned in all.
            until: When :meth:`expire` unpins it; None: never.

        Raises:
            ResourceExhaustedError: More than ``most`` pages would be pinned; nothing changed.
        """
        old = self._pins.get(name)
        kept = [pin.node for pin in self._pins.values() if pin is not old]
        needed = sum(len(node.pages) for node in _and_above([*kept, match.node]))
        if needed > most:
            raise ResourceExhaustedError(f"{needed} pages would be pinned; at most {most} can be", field="token_ids")
        for window in self._scarce:
            if (len(kept) + 1) * window.tail + window.least > window.num_pages:
                raise ResourceExhaustedError(
                    f"the pages of a window would not do for {len(kept) + 1} pins and a request", field="token_ids"
                )
        self._tree.lock(match.node)
        self._pins[name] = _Pin(match.node, until, tuple(each.hold(match.pages) for each in self._windows))
        if old is not None:
            self._release(old)

    def remove(self, name: str) -> bool:
        """Removes a pin; returns whether there was one of this name."""
        pin = self._pins.pop(name, None)
        if pin is not None:
            self._release(pin)
        return pin is not None

    def clear(self) -> None:
        """Removes all pins."""
        for name in [*self._pins]:
            self.remove(name)

    def expire(self, now: float) -> None:
        """Removes the pins whose time is over. O(pins)."""
        for name in [name for name, pin in self._pins.items() if pin.until is not None and pin.until <= now]:
            self.remove(name)

    def ends(self) -> list[Node]:
        """The locked node of each pin."""
        return [pin.node for pin in self._pins.values()]

    def nodes(self) -> set[Node]:
        """All nodes that hold something pinned."""
        return _and_above(self.ends())

    def held(self, nth: int) -> list[PageIds]:
        """The pages that each pin holds of the ``nth`` window."""
        return [pin.held[nth] for pin in self._pins.values()]

    def _release(self, pin: _Pin) -> None:
        self._tree.unlock(pin.node)
        for window, pages in zip(self._windows, pin.held, strict=True):
            window.let_go(pages)


def _and_above(ends: list[Node]) -> set[Node]:
    """These nodes and all above them."""
    found: set[Node] = set()
    for node in ends:
        at: Node | None = node
        while at is not None and at not in found:
            found.add(at)
            at = at.parent
    return found


# The prefix cache: keeps radix tree, ledger and page table in step, so that a page changes owner in all of them at
# once.
#
# A row of the page table begins with pages of the tree, which are locked for the row, and continues with pages of its
# own. Layers that see only a window have their own tables and pages (``pages.py``).
#
# Tokens are shared, not only pages: where a row and a page of the tree have a beginning in common, the row's first own page is a
# copy of that page, made on the device before the row's first step computes; the row writes what follows. The page is locked
# until that step has ended. The page that a row is writing is offered in the same way: the tree gets it as a part of a page,
# with the tokens computed so far, and the row goes on to write behind them. Layers that keep a state share pages only.


_TRIES = 64
"""Requests whose pages were cached, after which a component that has served none of them is named."""


class UselessComponents:
    """Finds components of the cache that never have what a cached prefix needs, so that nothing is ever a hit. O(1) a request."""

    def __init__(self) -> None:
        self._served: set[str] = set()
        self._missed: dict[str, int] = {}

    def note(self, name: str, *, served: bool) -> None:
        """Notes whether a component served a request whose pages were cached; warns once if it never does."""
        if served:
            self._served.add(name)
        elif name not in self._served:
            self._missed[name] = missed = self._missed.get(name, 0) + 1
            if missed == _TRIES:
                logger.warning(
                    "the prefix cache: %d requests had cached pages, but the %s of none of them were there: all were computed "
                    "again; a larger KV cache would keep them longer", missed, name,
                )  # fmt: skip


_NO_COPIES = np.zeros((0, 3), np.int64)

Written = tuple[PageHandle, ...]
"""Handles of pages, one for each page table."""


class PrefixCache:
    """Pages of prompts and answers kept for requests to come.

    Attributes:
        enabled: If not, nothing is kept and nothing found.
        windows: The pages of layers that see a window only.
        scarce: Those windows that have fewer pages than the page table.
        states: The snapshots of layers that keep a state; None: no layer does, or nothing is kept.
        shares_parts: Whether tokens of a page are shared that is not equal to the end.
        part_tokens: Tokens that rows have taken from such pages.
        found_tokens: Tokens of prefixes whose pages the tree had, when requests began.
        state_tokens: How many of these a state covered too.
        pins: The prefixes that are pinned.
        taken: Pages that :meth:`take` gave.

    Args:
        allocator: The ledger.
        page_table: Rows of the running requests.
        page_size: Tokens in a page.
        enabled: Whether anything is kept and found.
        eviction: Which prefix is evicted first when room is needed.
        below: The tiers below; None: there are none.
        events: Records stored and removed pages; None: nothing is recorded.
        windows: The pages of layers that see a window only.
        states: The slots for snapshots of states; None: no layer keeps a state.
        pictures: The names of pictures in tokens; None: there are none.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        page_table: PageTable,
        page_size: int,
        *,
        enabled: bool = True,
        eviction: EvictionName = "lru",
        below: LowerTiers | None = None,
        events: KvEventLog | None = None,
        windows: Sequence[WindowGroup] = (),
        states: StateSlots | None = None,
        pictures: PictureNames | None = None,
    ) -> None:
        self._allocator = allocator
        self._table = page_table
        self._pictures = pictures
        self._tree = RadixTree(page_size, eviction, events, pictures, alone=below is None)
        self._page_size = page_size
        self.enabled = enabled
        self._below = below if enabled else None
        self._rows: dict[int, Row] = {}
        self.taken: set[int] = set()
        rows, width = page_table.rows.shape
        self.windows = [
            WindowPages(group, page_size, allocator.num_pages, rows, width, self._unkept) for group in windows
        ]
        # The others have a page for each page of the page table, so they never run out first.
        self.scarce = [window for window in self.windows if window.num_pages < allocator.num_pages]
        self.states: StateSnapshots | None = None
        if states is not None and enabled:
            self.states = StateSnapshots(states.snapshots, page_size, allocator.num_pages)
        self.shares_parts = enabled and states is None and page_size > 1
        self.part_tokens = self.found_tokens = self.state_tokens = 0
        # The pages of the tree's parts, the locks of rows besides those on their prefixes, and the copies for the coming step.
        self._parts: set[int] = set()
        self._part_locks = 0
        self._page_copies: list[tuple[int, int, int]] = []
        self._useless = UselessComponents()
        held: list[WindowPages | StateSnapshots] = [*self.windows]
        self.pins = Pins(self._tree, held if self.states is None else [*held, self.states], self.scarce)
        self._tables = page_table.rows, *(each.table for each in self.windows)
        self._ledgers = allocator, *(each.ledger for each in self.windows)
        if self._below is not None:
            self._below.beside(self.windows, allocator.epoch_of, self)

    @property
    def num_evictable(self) -> int:
        """Pages that eviction could free now."""
        return self._tree.num_evictable

    @property
    def num_pages(self) -> int:
        """All pages of the pool."""
        return self._allocator.num_pages

    @property
    def num_available(self) -> int:
        """Pages that :meth:`allocate` could give now: free ones and evictable ones."""
        return self._allocator.num_free + self._tree.num_evictable

    def probe(self, token_ids: array[int], namespace: bytes) -> tuple[int, int]:
        """How many pages :meth:`open` would find, and how many of these count as available now. Changes nothing."""
        key = self._key(token_ids, 0, self._usable(token_ids))
        return self._tree.probe(key, namespace, self._resumable if self.windows else None)

    def find(self, token_ids: array[int], namespace: bytes) -> int:
        """How many tokens :meth:`open` and :meth:`load` would spare, without tiers. Changes nothing."""
        end = self._usable(token_ids)
        tokens = self._tree.extent(token_ids[:end].tobytes(), namespace) if self.shares_parts else 0
        if self.shares_parts and not self.windows:
            return tokens
        key = self._key(token_ids, 0, end)
        usable = self._resumable if self.windows or self.states is not None else None
        whole = self._tree.probe(key, namespace, usable)[0]
        return tokens if tokens // self._page_size == whole else whole * self._page_size

    def path(self, token_ids: array[int], namespace: bytes) -> list[int]:
        """The path of the prefix that :meth:`open` would find: a number for each node of the tree, from the root."""
        return self._tree.path(self._key(token_ids, 0, self._usable(token_ids)), namespace)

    def open(self, slot: int, name: str, token_ids: array[int], namespace: bytes, expected: int = 0) -> int:
        """Begins an empty row with the longest cached prefix, locked, leaving at least one token to compute.

        Args:
            slot: The row.
            name: What to call its owner in errors.
            token_ids: All known tokens of the sequence.
            namespace: Within which to look.
            expected: How many tokens the row is expected to have in the end; needed if there are windows.

        Returns:
            The number of tokens that need not be computed. Where layers keep a state, the row may begin with more pages: the
            tokens after the state are computed again, but their keys and values are there (:meth:`kept`).
        """
        match, found = self._match(self._key(token_ids, 0, self._usable(token_ids)), namespace)
        if found:
            for window in self.windows:
                self._useless.note(f"windows of {window.reach + 1} tokens", served=len(match.pages) > 0)
        self._tree.lock(match.node)
        self._allocator.name(slot, f"request {name}")
        self._table.append(slot, match.pages)
        for window in self.windows:
            window.open(slot, f"request {name}", match.pages, found, expected)
        count = len(match.pages)
        self._rows[slot] = Row(match.node, count, count * self._page_size)
        if self.states is not None:
            resumed = self.states.open(slot, f"request {name}", match.pages)
            self.found_tokens += count * self._page_size
            self.state_tokens += resumed * self._page_size
            if count:
                self._useless.note("states", served=resumed > 0)
            count = resumed
        if self._below is not None:
            self._below.open(slot, token_ids[: self._usable(token_ids)], namespace, match.pages)
        if self.shares_parts and len(match.pages) == found and (self._below is None or not self._below.kept(slot)):
            self._open_part(slot, self._rows[slot], token_ids)
        return count * self._page_size

    def _open_part(self, slot: int, row: Row, token_ids: array[int]) -> None:
        """Locks the page that has the longest beginning in common with the tokens after the row's shared pages, if there is one
        and its window pages are there."""
        start = row.shared * self._page_size
        wanted = token_ids[start : min(self._usable(token_ids), start + self._page_size)].tobytes()
        if (found := self._tree.beginning(row.node, wanted)) is None:
            return
        page, tokens = int(found[0].pages[0]), found[1]
        if any(window.page_beside(page) < 0 for window in self.windows):
            return
        row.source, row.copied = self._tree.first_page(found[0]), tokens
        self._tree.lock(row.source)
        self._part_locks += 1
        row.held = tuple(window.hold(row.source.pages) for window in self.windows)

    def forgo_part(self, slot: int) -> None:
        """Has a row begin without the copy that :meth:`load` would ask for: the page is needed."""
        self._leave_source(self._rows[slot])

    def _leave_source(self, row: Row) -> None:
        if row.source is not None:
            self._tree.unlock(row.source)
            self._part_locks -= 1
            for window, pages in zip(self.windows, row.held, strict=True):
                window.let_go(pages)
            row.source, row.copied, row.held = None, 0, ()

    def arriving(self, slot: int) -> bool:
        """Whether a row begins with pages that a step in flight fills by copies."""
        return self._rows[slot].arriving

    def take_page_copies(self) -> npt.NDArray[np.int64]:
        """The copies that rows need before the coming step computes; :attr:`Step.page_copies`."""
        if not self._page_copies:
            return _NO_COPIES
        copies, self._page_copies = self._page_copies, []
        return np.array(copies, np.int64)

    def kept(self, slot: int) -> int:
        """How many first tokens of a row had their keys and values in place when it was opened."""
        return self._rows[slot].kept

    def continuation(self, slot: int, token_ids: array[int]) -> array[int]:
        """Tokens that follow a row's tokens in a cached sequence of any request; empty if there are none."""
        row = self._rows[slot]
        found: array[int] = array("I")
        tokens = self._tree.continuation(row.node, token_ids[row.shared * self._page_size :].tobytes())
        found.frombytes(tokens if self._pictures is None else self._pictures.plain(tokens))
        return found

    def allocate(self, slot: int, count: int) -> bool:
        """Adds ``count`` pages to a row, evicting if need be. Returns False and changes nothing if there are too few pages."""
        if count > self.num_available:
            return False
        self._table.append(slot, self._allocate(count, slot))
        return True

    @property
    def num_takable(self) -> int:
        """How many pages :meth:`take` could give now. They leave room for the longest request, if nothing else runs."""
        pinned = sum(len(node.pages) for node in self.pins.nodes())
        most = self._allocator.num_pages - self._table.rows.shape[1] - pinned - len(self.taken)
        return max(0, min(most, self.num_available)) if self.enabled else 0

    def take(self, count: int) -> PageIds:
        """Takes up to ``count`` pages for a KV transfer to fill; the transfer has them until :meth:`adopt` or
        :meth:`give_back`."""
        pages = self._allocate(min(count, self.num_takable), TRANSFER)
        self.taken.update(pages.tolist())
        return pages

    def give_back(self, pages: Sequence[int]) -> None:
        """Frees pages that were taken; nobody writes to them any more."""
        self._allocator.free(pages, TRANSFER)
        self.taken.difference_update(pages)

    def adopt(self, prompt: Prompt, filled: Callable[[int], int | None]) -> int:
        """Shares pages that were taken and filled; see :class:`~sapwood_worker.core.cache.transfer.reads.DeviceRoom`."""
        match = self._tree.match(self._key(prompt.token_ids, 0, len(prompt.token_ids)), prompt.namespace)
        pages: list[int] = []
        while (page := filled(len(match.pages) + len(pages))) is not None:
            pages.append(page)
        start, end = len(match.pages), len(match.pages) + len(pages)
        if pages:
            new, size = np.array(pages, np.int32), self._page_size
            self._tree.insert(match.node, self._key(prompt.token_ids, start * size, end * size), new)
            self._allocator.move(new, TRANSFER, CACHE)
            self.taken.difference_update(pages)
            if self._below is not None:
                self._below.adopted(prompt.pages[start:end], new)
        return end

    def _allocate(self, count: int, owner: int) -> PageIds:
        """Takes free pages for an owner; evicts cached pages if too few are free. The pool has enough pages."""
        missing = count - self._allocator.num_free
        if missing > 0:
            pages = self._tree.evict(missing)
            whole = self._without_parts(pages)
            if self._below is not None:
                self._below.evicted(whole)
            self._drop(pages)
        return self._allocator.allocate(count, owner)

    def _without_parts(self, evicted: PageIds) -> PageIds:
        """Those of the evicted pages that were whole; forgets the others."""
        if self._parts.isdisjoint(pages := evicted.tolist()):
            return evicted
        whole = np.array([page for page in pages if page not in self._parts], np.int32)
        self._parts.difference_update(pages)
        return whole

    def load(self, slot: int) -> int:
        """Asks the tiers below to fill the first pages that are the row's own, before the coming step computes; or for a copy of
        a page that begins as the row's first own page does.

        Called once, after :meth:`open` and :meth:`allocate`. Until the next commit, which follows the step, the transfer
        owns the pages that it fills, and the page that is copied is locked.

        Returns:
            The number of tokens that these pages hold.
        """
        row = self._rows[slot]
        if row.source is not None:
            return self._copy_part(slot, row, row.source)
        if self._below is None:
            return 0
        count = self._below.kept(slot)
        if count:
            loading = self._table.pages(slot, row.shared)[:count].copy()
            row.windows = tuple(each.begin_load(slot, row.shared, row.shared + count) for each in self.windows)
            self._below.load(slot, loading, row.windows)
            self._allocator.move(loading, slot, TRANSFER)
            row.loading = self._allocator.handle(loading)
        return count * self._page_size

    def _copy_part(self, slot: int, row: Row, source: Node) -> int:
        """Asks for the copy of the page that the row begins with, unless a window has no page for it; returns the tokens."""
        end = row.shared * self._page_size + row.copied
        if any(window.extend(slot, end) < end for window in self.windows):
            self._leave_source(row)
            return 0
        page = int(source.pages[0])
        self._page_copies.append((0, page, int(self._table.pages(slot)[row.shared])))
        for group, window in enumerate(self.windows, 1):
            if window.reach:
                mine = int(window.table[slot, row.shared])
                self._page_copies.append((group, window.page_beside(page), mine))
        self.part_tokens += row.copied
        return row.copied

    def extend(self, slot: int, tokens: int, computed: int, *, share: bool = False) -> int:
        """Gives a row window pages for its first ``tokens`` tokens; ``computed`` of them are computed. Returns how many tokens
        have pages.

        Args:
            slot: The row.
            tokens: How many tokens need pages.
            computed: How many of these are computed already; pages that no later token sees are freed.
            share: Whether to leave the pages that other rows are expected to need.
        """
        reached = sys.maxsize
        for window in self.windows:
            window.slide(slot, computed)
            reached = min(reached, window.extend(slot, tokens, window.outstanding(slot) if share else 0))
        return reached

    def reach(self, slot: int) -> int:
        """How many tokens of a row have window pages."""
        return min((window.tokens(slot) for window in self.windows), default=sys.maxsize)

    def pages_of(
        self, rows: npt.NDArray[np.int64], last: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int32], Written]:
        """The pages of some rows up to entries ``last``, the page tables side by side, and handles of the last pages.

        The pages are a copy, int32 [rows, tables * most pages]; entries beyond a row's last page are undefined.
        """
        width = int(last.max()) + 1 if len(last) else 0
        parts = [table[rows, :width] for table in self._tables]
        at = np.arange(len(rows)), last
        written = tuple([ledger.handle(part[at]) for ledger, part in zip(self._ledgers, parts, strict=True)])
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1), written

    def confirm(self, written: Written) -> None:
        """Checks that the pages were not allocated again; raises LedgerError if one was."""
        for ledger, handle in zip(self._ledgers, written, strict=True):
            ledger.confirm(handle)

    def commit(self, slot: int, token_ids: array[int], computed: int) -> None:
        """Shares the pages of a row's first ``computed`` tokens, whose KV must be in place.

        If the tree has a page with these tokens already, the row takes it and frees its own.
        """
        row = self._rows[slot]
        self._arrived(slot, row)
        if self.enabled and not row.private:
            if computed // self._page_size > row.shared:
                self._share(slot, row, token_ids, computed)
            if self.shares_parts:
                self._share_part(slot, row, token_ids, computed)
        for window in self.windows:
            window.slide(slot, computed)
        self._commit_states(slot, row)
        self._balance(slot)

    def _share(self, slot: int, row: Row, token_ids: array[int], computed: int) -> None:
        """Shares the full pages."""
        start, end, part = row.shared, computed // self._page_size, row.part
        own = self._table.pages(slot, start)[: end - start].copy()
        key = self._key(token_ids, start * self._page_size, computed)
        grown = part is not None and self._tree.grow(part, key, own.copy())
        cached = self._tree.insert(row.node, key, own)
        taken = cached.pages == own
        first = row.in_tree - start  # a page that was a part is the cache's already
        self._allocator.move(own[first:][taken[first:]], slot, CACHE)
        if not taken.all():
            self._table.replace(slot, start, cached.pages)
            self._allocator.free(own[first:][~taken[first:]], slot)
        if grown:
            self._parts.discard(int(own[0]))
        for window in self.windows:
            if first and not grown:
                window.rebase(slot, start, int(own[0]), int(cached.pages[0]))
            window.commit(slot, start + first, cached.pages[first:])
        if self._below is not None:
            self._below.cached(slot, token_ids, start, cached.pages, own[taken])
        self._tree.lock(cached.node)
        self._tree.unlock(row.node)
        self._leave_part(row)
        row.node, row.shared = cached.node, end

    def _share_part(self, slot: int, row: Row, token_ids: array[int], computed: int) -> None:
        """Offers the tokens of the page that the row is writing."""
        tokens = token_ids[row.shared * self._page_size : computed].tobytes()
        if row.part is not None:
            if len(tokens) > len(row.part.key):
                self._tree.grow(row.part, tokens, row.part.pages)
            return
        if not tokens:
            return
        pages = self._table.pages(slot, row.shared)[:1].copy()
        row.part = self._tree.insert_part(row.node, tokens, int(pages[0]))
        if row.part is not None:
            self._tree.lock(row.part)
            self._part_locks += 1
            self._parts.add(int(pages[0]))
            self._allocator.move(pages, slot, CACHE)
            for window in self.windows:
                window.commit(slot, row.shared, pages)

    def _leave_part(self, row: Row) -> None:
        if row.part is not None:
            self._tree.unlock(row.part)
            self._part_locks -= 1
            row.part = None

    def _commit_states(self, slot: int, row: Row) -> None:
        if self.states is not None:
            self.states.commit(slot, self._table.pages(slot)[: row.shared])

    def keep_private(self, slot: int) -> None:
        """Has a row share no further page: what it computes from now on is not what its namespace stands for."""
        self._rows[slot].private = True

    def close(self, slot: int) -> None:
        """Ends a row: unlocks its prefix and frees the pages that are its own."""
        row = self._rows.pop(slot)
        self._arrived(slot, row)
        if self._below is not None:
            self._below.close(slot)
        for window in self.windows:
            window.close(slot)
        if self.states is not None:
            self.states.close(slot)
        self._tree.unlock(row.node)
        own = self._table.pages(slot, row.in_tree)
        self._leave_part(row)
        self._allocator.free(own, slot)
        self._allocator.ended(slot)
        self._balance(slot)

    def pin(self, name: str, token_ids: array[int], namespace: bytes, most: int, until: float | None) -> int:
        """Locks the cached part of a prefix; a pin of the same name is replaced.

        Args:
            name: The pin's.
            token_ids: The prefix.
            namespace: Within which to look.
            most: Pages that may be pinned in all.
            until: When it is taken back; None: never.

        Returns:
            The number of tokens pinned, in whole pages.

        Raises:
            ResourceExhaustedError: As :meth:`Pins.add`.
        """
        key = self._key(token_ids, 0, len(token_ids))
        match, _ = self._match(key, namespace)
        if self.states is not None and (usable := self.states.usable(match.pages)) < len(match.pages):
            match = self._tree.match(key[: usable * self._page_size * TOKEN_BYTES], namespace)
        self.pins.add(name, match, most - len(self.taken), until)
        return len(match.pages) * self._page_size

    def flush(self, *, keep: bool = False) -> int:
        """Forgets everything that no running request and no pin holds; returns the number of pages freed.

        Args:
            keep: Whether the tiers below may copy the content first, as in an eviction.
        """
        pages = self._tree.evict(self._tree.num_evictable, reset=True)
        whole = self._without_parts(pages)
        if self._below is not None:
            (self._below.evicted if keep else self._below.dropped)(whole)
        self._drop(pages)
        return len(pages)

    def check_idle(self) -> None:
        """Checks that nothing is held while no row is open; vectorised, O(pages).

        Raises:
            AssertionError: A page leaked or a lock was left behind; the message names the requests.
        """
        check_idle(self._allocator, self._tree, self.pins, self._rows, self.windows, len(self.taken), self.states)

    def check(self) -> None:
        """Compares tree, ledger and rows page by page; for tests.

        Raises:
            AssertionError: They disagree.
        """
        check_pages(
            self._allocator, self._table, self._tree, self.pins, self._rows, self.windows, list(self.taken), self.states
        )

    def _balance(self, slot: int) -> None:
        """After a change of a row, compares the counts of locked and cached pages with the expected ones. O(1).

        Raises:
            LedgerError: This row has just lost a lock or a page.
        """
        locks = len(self._rows) + len(self.pins) + self._part_locks
        if self._tree.num_locks != locks:
            name = self._allocator.name_of(slot)
            raise LedgerError(f"{name}: {self._tree.num_locks} locks where rows and pins have {locks}")
        if self._allocator.num_held(CACHE) != self._tree.num_pages:
            raise LedgerError(f"{self._allocator.name_of(slot)}: the tree's pages are not those that the cache has")

    def _arrived(self, slot: int, row: Row) -> None:
        self._leave_source(row)
        if row.loading is not None and self._below is not None:
            self._allocator.confirm(row.loading)
            self._allocator.move(row.loading.pages, TRANSFER, slot)
            for window, pages in zip(self.windows, row.windows, strict=True):
                window.loaded(slot, pages)
            row.loading, row.windows = None, ()
            self._below.loaded(slot)

    def _match(self, key: bytes, namespace: bytes) -> tuple[Match, int]:
        """The longest prefix that all layers can serve, and how many pages the tree has of the key."""
        match = self._tree.match(key, namespace)
        found = len(match.pages)
        # Tokens after a state are computed again, and see no windows that are gone: with windows the prefix ends at a state.
        if self.windows and (usable := self._resumable(match.pages)) < found:
            match = self._tree.match(key[: usable * self._page_size * TOKEN_BYTES], namespace)
        return match, found

    def _servable(self, pages: PageIds) -> int:
        """How many pages of a prefix in the tree can be used: the longest prefix at whose end every window still has its
        pages."""
        count = len(pages)
        while any((fewer := window.usable(pages[:count])) < count for window in self.windows):
            count = fewer
        return count

    def _resumable(self, pages: PageIds) -> int:
        """How many pages of a prefix in the tree need not be computed: those at whose end there is all that layers keep."""
        count = self._servable(pages)
        while self.states is not None and (fewer := self.states.usable(pages[:count])) < count:
            count = self._servable(pages[:fewer])
        return count

    def _drop(self, pages: PageIds) -> None:
        """Frees pages that have left the tree, and their window pages."""
        for window in self.windows:
            window.evicted(pages)
        if self.states is not None:
            self.states.evicted(pages)
        self._allocator.free(pages, CACHE)

    def _unkept(self, pages: PageIds) -> None:
        """Reports that pages of the tree lose their pages in a window."""
        if self._below is not None:
            self._below.dropped(pages)

    def _usable(self, token_ids: array[int]) -> int:
        """The tokens that may come from the cache: all but the last, which is computed again for its logits."""
        return len(token_ids) - 1 if self.enabled else 0

    def _key(self, token_ids: array[int], start: int, end: int) -> bytes:
        """The whole pages of ``token_ids[start:end]``; ``start`` is a multiple of the page."""
        return token_ids[start : end // self._page_size * self._page_size].tobytes()
