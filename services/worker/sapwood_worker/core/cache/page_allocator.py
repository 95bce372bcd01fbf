"""The page ledger: every page of the pool has exactly one owner: nobody, the prefix cache, a transfer or one request.

Algorithm: a stack of free page ids, and numpy arrays with each page's owner and epoch. Taking and giving back n pages is O(n),
vectorised; :meth:`check` is O(pages). The checks are always on: a page that is freed twice, or by someone who does not own it, or
that an owner keeps beyond its end, is an error at that moment and not a wrong token later. The error names the owner and the
one for whom the page was allocated last.

A page's epoch counts its allocations. Code that relies on a page later (at the end of a step in flight or of a transfer) holds
a :class:`PageHandle` and has it confirmed. That fails if the page was given away meanwhile, even if its new owner is the old one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

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
    """A page was about to have no owner or two. A bug of ours, never the fault of a request."""


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
        """Takes ``count`` free pages for an owner; the caller has made sure that there are as many.

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
        # The next to take as many gets them in this order: pages that lie side by side are copied as one.
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
        """Checks that a handle's pages have not been allocated again since it was made. O(pages of it), vectorised.

        Raises:
            LedgerError: One has; the message names its new owner.
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
        """Compares the free stack, and how many pages each has, with the owners.

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
        """Compares the ledger with who holds which page.

        Args:
            owners: int32 [num_pages], the owner of each page as found outside.
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
        """Whether a page comes twice: each page remembers its last place in the list, which must be its only one."""
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
