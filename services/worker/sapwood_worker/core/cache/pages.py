"""The pages of the device, in integers: who owns each page, which pages a request has, and the pages of windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sapwood_worker.records.kv_layout import WindowGroup

# The page ledger: every page of the pool has exactly one owner: nobody, the prefix cache, a transfer or one request.
#
# Algorithm: a stack of free page ids, and numpy arrays with each page's owner and epoch. Taking and giving back n pages
# is O(n), vectorised; :meth:`check` is O(pages). The checks are always on: freeing a page twice, or without owning it, or
# keeping it after the owner has ended, is an error at once and not a wrong token later.
# The error names the owner and the one for whom the page was allocated last.
#
# A page's epoch counts its allocations. Code that relies on a page later (at the end of a step in flight or of a transfer)
# holds a :class:`PageHandle` and confirms it. Confirming fails if the page was allocated again since, even to the same owner.


FREE = -1
"""Owner of a page that nobody uses."""
CACHE = -2
"""Owner of a page that the prefix cache holds. Requests own pages under their slot, 0 and up."""
TRANSFER = -3
"""Owner of a page that a transfer is writing: its content is not there yet."""

PageIds = npt.NDArray[np.int32]


class PageHandle(NamedTuple):
    """Pages as they were at some time: ids and epochs, one each."""

    pages: PageIds
    epochs: npt.NDArray[np.int64]


class LedgerError(AssertionError):
    """A page was about to have no owner or two owners: a bug in Sapwood, never the fault of a request."""


class PageAllocator:
    """Owners of all pages.

    Args:
        num_pages: Pages in the pool; their ids are 0 .. num_pages - 1.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._num_free = num_pages
        self._owner = np.full(num_pages, FREE, dtype=np.int32)
        self._epoch = np.zeros(num_pages, dtype=np.int64)
        self._place = np.zeros(num_pages, dtype=np.int64)
        self._held = {FREE: num_pages, CACHE: 0, TRANSFER: 0}
        self._borrowers = np.full(num_pages, "nobody", dtype=object)
        self._names = {FREE: "nobody (it is free)", CACHE: "the prefix cache", TRANSFER: "a transfer"}

    @property
    def num_free(self) -> int:
        """Pages nobody owns."""
        return self._num_free

    @property
    def num_used(self) -> int:
        """Pages that somebody owns."""
        return self.num_pages - self._num_free

    def name(self, owner: int, name: str) -> None:
        """Says what to call an owner in errors."""
        self._names[owner] = name

    def name_of(self, owner: int) -> str:
        """What an owner is called."""
        return self._names.get(owner, f"the request in slot {owner}")

    def allocate(self, count: int, owner: int) -> PageIds:
        """Takes ``count`` free pages for an owner; the caller has made sure that this many are free.

        Each page's epoch goes up by one, which makes older handles stale.
        """
        if count > self._num_free:
            raise LedgerError(f"{count} pages asked for {self.name_of(owner)}, {self._num_free} are free")
        pages = self._free[self._num_free - count : self._num_free][::-1].copy()
        self._num_free -= count
        self._owner[pages] = owner
        self._epoch[pages] += 1
        self._borrowers[pages] = self.name_of(owner)
        self._count(count, FREE, owner)
        return pages

    def move(self, pages: PageIds | Sequence[int], source: int, target: int) -> None:
        """Changes the owner of pages; all of them must be ``source``'s."""
        ids = np.asarray(pages, dtype=np.int32)
        if not len(ids):
            return
        self._expect(ids, source)
        self._owner[ids] = target
        self._count(len(ids), source, target)

    def free(self, pages: PageIds | Sequence[int], owner: int) -> None:
        """Gives pages back; all of them must be ``owner``'s and none may come twice."""
        ids = np.asarray(pages, dtype=np.int32)
        if not len(ids):
            return
        self._expect(ids, owner)
        if self._repeats(ids):
            raise LedgerError(f"{self.name_of(owner)} frees a page twice in one call: {sorted(ids.tolist())}")
        self._owner[ids] = FREE
        # The next caller that takes the same number of pages gets them in this order: pages that lie side by side are copied as
        # one.
        self._free[self._num_free : self._num_free + len(ids)] = ids[::-1]
        self._num_free += len(ids)
        self._count(len(ids), owner, FREE)

    def num_held(self, owner: int) -> int:
        """How many pages an owner has. O(1)."""
        return self._held.get(owner, 0)

    def ended(self, owner: int) -> None:
        """Says that an owner has come to its end. O(1).

        Raises:
            LedgerError: It still has pages.
        """
        if self.num_held(owner):
            raise LedgerError(f"{self.name_of(owner)} has ended, but keeps pages {self.owned_by(owner).tolist()}")

    def owned_by(self, owner: int) -> PageIds:
        """The pages of an owner, in order of id."""
        return np.flatnonzero(self._owner == owner).astype(np.int32)

    def epoch_of(self, page: int) -> int:
        """How often a page has been allocated."""
        return int(self._epoch[page])

    def handle(self, pages: PageIds) -> PageHandle:
        """A handle of pages as they are now. The caller does not change ``pages`` any more."""
        return PageHandle(pages, self._epoch[pages])

    def confirm(self, handle: PageHandle) -> None:
        """Checks that a handle's pages have not been allocated again since the handle was made. O(its pages), vectorised.

        Raises:
            LedgerError: A page was allocated again; the message names its new owner.
        """
        stale = self._epoch[handle.pages] != handle.epochs
        if stale.any():
            raise LedgerError(f"somebody relied on pages that have changed hands: {self.describe(handle.pages[stale])}")

    def used(self) -> PageIds:
        """The pages that somebody owns, in order of id."""
        return np.flatnonzero(self._owner != FREE).astype(np.int32)

    def describe(self, pages: PageIds) -> str:
        """Some pages, for errors: ids, owners, and for whom they were allocated last."""
        owners = sorted({self.name_of(owner) for owner in self._owner[pages].tolist()})
        return (
            f"{pages.tolist()} of {', '.join(owners)}, allocated for {', '.join(sorted(set(self._borrowers[pages])))}"
        )

    def check(self) -> None:
        """Compares the free stack and each owner's page count with the owners of the pages.

        Raises:
            LedgerError: They disagree.
        """
        stack = self._free[: self._num_free]
        if self._repeats(stack) or not bool((self._owner[stack] == FREE).all()):
            raise LedgerError("the free stack holds a page twice or a page that is owned")
        if int((self._owner == FREE).sum()) != self._num_free:
            raise LedgerError("a page is neither owned nor free")
        lowest = TRANSFER
        counts = np.bincount(self._owner - lowest, minlength=max(self._held) - lowest + 1)
        if any(counts[owner - lowest] != count for owner, count in self._held.items()):
            raise LedgerError("it is miscounted how many pages each owner has")

    def check_owners(self, owners: PageIds, used: int) -> None:
        """Compares the ledger with the pages that owners really hold.

        Args:
            owners: int32 [num_pages]: the holder of each page, found by looking at all holders.
            used: How often a page was found to be owned, over all owners.

        Raises:
            LedgerError: They disagree.
        """
        self.check()
        wrong = np.flatnonzero(self._owner != owners)
        if len(wrong):
            page = int(wrong[0])
            held, known = self.name_of(int(owners[page])), self.name_of(int(self._owner[page]))
            raise LedgerError(f"page {page} is held by {held}, the ledger says by {known}")
        if used != self.num_used:
            raise LedgerError("a page is held in two places")

    def _repeats(self, ids: PageIds) -> bool:
        """Whether a page occurs twice: each page remembers its last place in the list, which must be its only one."""
        places = np.arange(len(ids))
        self._place[ids] = places
        return bool((self._place[ids] != places).any())

    def _expect(self, ids: PageIds, owner: int) -> None:
        wrong = ids[self._owner[ids] != owner]
        if len(wrong):
            page = int(wrong[0])
            held, known = self.name_of(owner), self.name_of(int(self._owner[page]))
            raise LedgerError(
                f"page {page} belongs to {known}, not to {held}; it was allocated for {self._borrowers[page]}"
            )

    def _count(self, count: int, source: int, target: int) -> None:
        self._held[source] -= count
        self._held[target] = self._held.get(target, 0) + count


# Which pages hold the KV of which request, in order of position.


class PageTable:
    """One row of page ids for each running request.

    Attributes:
        rows: int32 [max_running, max_pages]; entry i of a row holds positions ``i * page_size`` .. ``(i + 1) * page_size - 1``.
            Entries beyond a row's length are undefined.

    Args:
        max_running: Rows.
        max_pages: The most pages one request can have.
    """

    def __init__(self, max_running: int, max_pages: int) -> None:
        self.rows: npt.NDArray[np.int32] = np.zeros((max_running, max_pages), dtype=np.int32)
        self._lengths = [0] * max_running
        self._free_slots = list(range(max_running - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Rows that no request has."""
        return len(self._free_slots)

    def open(self) -> int:
        """Takes an empty row; returns its slot."""
        slot = self._free_slots.pop()
        self._lengths[slot] = 0
        return slot

    def close(self, slot: int) -> None:
        """Gives a row back; its pages must have been taken care of."""
        assert slot not in self._free_slots
        self._lengths[slot] = 0
        self._free_slots.append(slot)

    def length(self, slot: int) -> int:
        """Pages in a row."""
        return self._lengths[slot]

    def pages(self, slot: int, start: int = 0) -> npt.NDArray[np.int32]:
        """A view of a row's pages from entry ``start`` on; valid until the row is written."""
        return self.rows[slot, start : self._lengths[slot]]

    def append(self, slot: int, pages: npt.NDArray[np.int32] | Sequence[int]) -> None:
        """Adds pages at the end of a row."""
        start = self._lengths[slot]
        self.rows[slot, start : start + len(pages)] = pages
        self._lengths[slot] = start + len(pages)

    def replace(self, slot: int, start: int, pages: npt.NDArray[np.int32] | Sequence[int]) -> None:
        """Overwrites entries from ``start`` on; the row keeps its length."""
        assert start + len(pages) <= self._lengths[slot]
        self.rows[slot, start : start + len(pages)] = pages


# Pages for layers that see only a window of tokens: they have a ledger and rows of their own, beside those of the other
# layers.
#
# Entry i of a row stands for the same positions as in the page table. A row keeps the pages that its next query sees,
# and those of the tokens being computed. A page that slides out of the window is freed, or left to the cache where the tree
# has the prefix.
# The tree does not know these pages: one of its pages may have a window page *beside* it, or none (any more). So a cached
# prefix can be used only up to a point where all pages that the next query sees have window pages (:meth:`WindowPages.usable`).
# Pages that no row uses are evicted when room is needed: first pages that have slid out of a window, then those at which a
# sequence ended or branched off, since these are asked for again. In both groups the least recently used page goes first.
#
# Complexity: O(pages) for each page that enters or leaves a row, O(pages of the prefix), vectorised, to match. Bound:
# one entry for each page.


class WindowPages:
    """The pages of one window.

    Args:
        group: How far back the layers see, and their pages.
        page_size: Tokens in a page.
        num_cached: Pages that the tree may hold.
        rows: Rows of the page table.
        width: Entries of a row.
        dropped: Called with the tree's pages that have just lost their window pages, before those are given away.

    Attributes:
        table: int32 [rows, width]; entries of freed pages are ``num_pages``, a page that holds nothing.
        num_pages: Pages of the pool.
        reach: How many tokens before it a query sees.
        tail: Pages before the next query's that it may see.
        least: Pages with which one request can run.
        ledger: Who owns its pages.
        num_freed: Pages that have slid out of their rows' windows so far.
    """

    def __init__(
        self,
        group: WindowGroup,
        page_size: int,
        num_cached: int,
        rows: int,
        width: int,
        dropped: Callable[[PageIds], object],
    ) -> None:
        self.num_pages = group.num_pages
        self.tail, self.least = group.tail(page_size), group.least(page_size)
        self.table = np.full((rows, width), group.num_pages, np.int32)
        self.num_freed = 0
        self.reach = group.reach
        self._page_size = page_size
        self._dropped = dropped
        self.ledger = PageAllocator(group.num_pages)
        # For each page of the tree its window page, and the reverse; for each window page, how many rows and pins use it.
        self._beside = np.full(num_cached, -1, np.int32)
        self._of = np.full(group.num_pages, -1, np.int32)
        self._users = np.zeros(group.num_pages, np.int32)
        # Cached pages that no row uses, least recently used first: those evicted first, and the others.
        self._passed: dict[int, None] = {}
        self._ends: dict[int, None] = {}
        # For each row: its first page, its end, the end of its cached pages, its branch, and the pages it is expected to need.
        self._first, self._end, self._shared, self._branch, self._need = np.zeros((5, rows), np.int64)

    @property
    def num_available(self) -> int:
        """Pages that a row could get now."""
        return self.ledger.num_free + len(self._passed) + len(self._ends)

    @property
    def num_used(self) -> int:
        """Pages that rows or the cache hold."""
        return self.ledger.num_used

    def needed(self, tokens: int) -> int:
        """The most pages that a row with this many tokens holds once it decodes."""
        return min(self.tail + 3, -(-tokens // self._page_size) + 1)

    def outstanding(self, slot: int = -1) -> int:
        """How many more pages all rows except ``slot`` are expected to ask for. O(rows), vectorised."""
        missing = np.maximum(self._need - (self._end - self._first), 0)
        return int(missing.sum()) - (int(missing[slot]) if slot >= 0 else 0)

    def usable(self, pages: PageIds) -> int:
        """How many of a cached prefix's pages can be used: all pages that the next query sees must exist."""
        ends = np.arange(1, len(pages) + 1)
        gap = np.maximum.accumulate(np.where(self._beside[pages] < 0, ends, 0))
        ok = np.flatnonzero(gap <= np.maximum(ends - self.tail, 0))
        return int(ok[-1]) + 1 if len(ok) else 0

    def hold(self, pages: PageIds) -> PageIds:
        """Locks the window pages at the end of a usable prefix; :meth:`let_go` unlocks them."""
        mine = self._beside[pages[max(0, len(pages) - self.tail) :]]
        assert (mine >= 0).all(), "a prefix was matched that cannot be used"
        for page in mine[self._users[mine] == 0].tolist():
            self._passed.pop(page, None)
            self._ends.pop(page, None)
        self._users[mine] += 1
        return mine

    def let_go(self, pages: PageIds) -> None:
        """Takes :meth:`hold` back."""
        self._leave(pages, self._ends)

    def open(self, slot: int, name: str, pages: PageIds, found: int, expected: int) -> None:
        """Begins a row.

        Args:
            slot: The row.
            name: What to call its owner in errors.
            pages: The tree's pages of the usable prefix.
            found: How many pages of the prefix the tree had, usable or not: requests branch at its end.
            expected: How many tokens the row is expected to have in the end.
        """
        self.ledger.name(slot, name)
        end = len(pages)
        mine = self.hold(pages)
        self._first[slot], self._end[slot], self._shared[slot] = end - len(mine), end, end
        self._branch[slot], self._need[slot] = found, self.needed(expected)
        self.table[slot, : end - len(mine)] = self.num_pages
        self.table[slot, end - len(mine) : end] = mine

    def slide(self, slot: int, position: int) -> None:
        """Releases the pages that no query at ``position`` or later sees."""
        old, new = int(self._first[slot]), max(0, position - self.reach) // self._page_size
        if new <= old:
            return
        end = int(self._end[slot])
        gone = self.table[slot, old : min(new, end)].copy()
        cached = min(max(0, int(self._shared[slot]) - old), len(gone))
        self.ledger.free(gone[cached:], slot)
        branch = min(max(0, int(self._branch[slot]) - self.tail - old), cached)
        left = min(max(0, int(self._branch[slot]) - old), cached)
        self._leave(gone[:branch], self._passed)
        self._leave(gone[branch:left], self._ends)
        self._leave(gone[left:cached], self._passed)
        self.table[slot, old:new] = self.num_pages
        self._first[slot], self._end[slot] = new, max(end, new)
        self.num_freed += len(gone)

    def extend(self, slot: int, tokens: int, keep: int = 0) -> int:
        """Gives a row pages for its first ``tokens`` tokens, or all free pages if these are too few. Returns how many tokens have
        pages.

        Args:
            slot: The row.
            tokens: How many.
            keep: Pages that must stay available.
        """
        end = int(self._end[slot])
        count = min(-(-tokens // self._page_size) - end, self.num_available - keep)
        if count > 0:
            self._evict(count - self.ledger.num_free)
            self.table[slot, end : end + count] = self.ledger.allocate(count, slot)
            end = self._end[slot] = end + count
        return int(end) * self._page_size

    def commit(self, slot: int, start: int, pages: PageIds) -> None:
        """Shares the row's window pages for the tree's ``pages``, which are the row's from entry ``start`` on. If a page of the
        tree has a window page already, the row takes that one and frees its own.
        """
        end = start + len(pages)
        first, last = max(start, int(self._first[slot])), min(end, int(self._end[slot]))
        self._shared[slot] = end
        if first >= last:
            return
        entries = self.table[slot, first:last]
        own, above = entries.copy(), pages[first - start : last - start]
        known = self._beside[above] >= 0
        new = own[~known]
        self.ledger.move(new, slot, CACHE)
        self._beside[above[~known]], self._of[new], self._users[new] = new, above[~known], 1
        if known.any():
            there = self._beside[above[known]]
            for page in there[self._users[there] == 0].tolist():
                self._passed.pop(page, None)
                self._ends.pop(page, None)
            self._users[there] += 1
            entries[known] = there
            self.ledger.free(own[known], slot)

    def rebase(self, slot: int, entry: int, part: int, page: int) -> None:
        """Notes that a row, whose ``entry``-th page was the tree's ``part``, has another page of the tree in its place."""
        if not int(self._first[slot]) <= entry < int(self._end[slot]):
            return
        mine, there = int(self.table[slot, entry]), int(self._beside[page])
        if there < 0:
            self._beside[part], self._beside[page], self._of[mine] = -1, mine, page
            return
        if not self._users[there]:
            self._passed.pop(there, None)
            self._ends.pop(there, None)
        self._users[there] += 1
        self.table[slot, entry] = there
        self._leave(np.array([mine], np.int32), self._ends)

    def close(self, slot: int) -> None:
        """Ends a row: frees its own pages, and leaves shared ones to the cache."""
        first, end = int(self._first[slot]), int(self._end[slot])
        cached = min(max(first, int(self._shared[slot])), end)
        self._leave(self.table[slot, first:cached], self._ends)
        self.ledger.free(self.table[slot, cached:end], slot)
        self.ledger.ended(slot)
        self._first[slot] = self._end[slot] = self._need[slot] = 0

    def beside(self, pages: PageIds) -> PageIds:
        """The window pages of pages of the tree; -1 where there is none."""
        return self._beside[pages]

    def page_beside(self, page: int) -> int:
        """The window page of a page of the tree; -1: there is none."""
        return int(self._beside[page])

    def tokens(self, slot: int) -> int:
        """Tokens up to which a row has pages."""
        return int(self._end[slot]) * self._page_size

    def begin_load(self, slot: int, start: int, end: int) -> PageIds:
        """Gives a row's pages of entries ``start`` to ``end`` to a transfer until :meth:`loaded`; -1 for missing pages."""
        self.slide(slot, end * self._page_size)
        if self.extend(slot, end * self._page_size) < end * self._page_size:
            raise LedgerError(f"{self.ledger.name_of(slot)} was started without pages for its window")
        pages = np.full(end - start, -1, np.int32)
        first = max(start, int(self._first[slot]))
        pages[first - start :] = self.table[slot, first:end]
        self.ledger.move(pages[first - start :], slot, TRANSFER)
        return pages

    def loaded(self, slot: int, pages: PageIds) -> None:
        """Gives the pages of :meth:`begin_load` to the row."""
        self.ledger.move(pages[pages >= 0], TRANSFER, slot)

    def evicted(self, pages: PageIds) -> None:
        """Frees what lies beside pages that leave the tree."""
        mine = self._beside[pages]
        self._forget(mine[mine >= 0])

    def check_idle(self, held: int) -> None:
        """Checks that no row holds a page and that pins use pages ``held`` times; raises AssertionError."""
        self.ledger.check()
        if int(self._users.sum()) != held or self.num_used != int((self._beside >= 0).sum()):
            raise LedgerError("nothing runs, yet pages of a window are used")

    def check(
        self, rows: dict[int, PageIds], loading: dict[int, PageIds], held: list[PageIds], cached: PageIds
    ) -> None:
        """Compares ledger, rows and the window pages of the tree's pages; for tests.

        Args:
            rows: For each open row, the tree's pages that it begins with.
            loading: For each row, the pages that a transfer owns.
            held: What pins hold.
            cached: All of the tree's pages.

        Raises:
            AssertionError: They disagree.
        """
        owners = np.full(self.num_pages, FREE, np.int32)
        users = np.zeros(self.num_pages, np.int32)
        found = 0
        for slot, above in rows.items():
            first, end, shared = (int(each[slot]) for each in (self._first, self._end, self._shared))
            assert shared == len(above), f"row {slot} shares what the tree does not have"
            assert (self.table[slot, :first] == self.num_pages).all(), f"row {slot} keeps what no query sees"
            mine = self.table[slot, first : min(max(first, shared), end)]
            assert (mine == self._beside[above[first:end]]).all(), f"row {slot} does not lie beside its prefix"
            users[mine] += 1
            own = self.table[slot, max(first, min(shared, end)) : end]
            owners[own] = slot
            owners[loading.get(slot, own[:0])] = TRANSFER
            found += len(own)
        for each in held:
            np.add.at(users, each, 1)
        mine = self._beside[self._beside >= 0]
        assert np.isin(np.flatnonzero(self._beside >= 0), cached).all(), "a page lies beside nothing"
        assert (self._of[mine] == np.flatnonzero(self._beside >= 0)).all(), "pages lie beside each other wrongly"
        owners[mine] = CACHE
        self.ledger.check_owners(owners, found + len(mine))
        assert (users == self._users).all(), "users were miscounted"
        unused = sorted([*self._passed, *self._ends])
        assert unused == sorted(mine[users[mine] == 0].tolist()), "eviction does not know what nobody uses"

    def _leave(self, pages: PageIds, to: dict[int, None]) -> None:
        self._users[pages] -= 1
        assert not len(pages) or self._users[pages].min() >= 0, "left more often than used"
        to.update(dict.fromkeys(pages[self._users[pages] == 0].tolist()))

    def _evict(self, count: int) -> None:
        if count <= 0:
            return
        chosen = np.array(
            [*islice(self._passed, count), *islice(self._ends, max(0, count - len(self._passed)))], np.int32
        )
        self._dropped(self._of[chosen])
        self._forget(chosen)

    def _forget(self, mine: PageIds) -> None:
        for page in mine.tolist():
            assert self._users[page] == 0, "a page is evicted that somebody uses"
            if page in self._passed:
                del self._passed[page]
            else:
                del self._ends[page]
        self._beside[self._of[mine]] = -1
        self._of[mine] = -1
        self.ledger.free(mine, CACHE)
