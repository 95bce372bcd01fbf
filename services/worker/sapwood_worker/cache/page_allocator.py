"""The page ledger: every page of the pool has exactly one owner: nobody, the prefix cache, a transfer or one request.

Algorithm: a stack of free page ids and, beside it, one owner and one epoch a page in numpy arrays. Taking and giving back n
pages is O(n), vectorised; :meth:`check` is O(pages). It is always on: a page that is freed twice, or by who does not own it,
is an error at that moment and not a wrong token later.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

FREE = -1
"""Owner of a page that nobody uses."""
CACHE = -2
"""Owner of a page that the prefix cache holds. Requests own pages under their slot, 0 and up."""
TRANSFER = -3
"""Owner of a page that a transfer is writing: what it holds is not there yet."""

PageIds = npt.NDArray[np.int32]


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

    def allocate(self, count: int, owner: int) -> PageIds:
        """Takes ``count`` free pages for an owner; the caller has made sure that there are as many.

        Each page's epoch goes up by one: whoever still remembers the page under its old epoch knows that it is another.
        """
        if count > self._num_free:
            raise LedgerError(f"{count} pages asked for {self._name(owner)}, {self._num_free} are free")
        pages = self._free[self._num_free - count : self._num_free][::-1].copy()
        self._num_free -= count
        self._owner[pages] = owner
        self._epoch[pages] += 1
        return pages

    def move(self, pages: PageIds | Sequence[int], source: int, target: int) -> None:
        """Changes the owner of pages; all of them must be ``source``'s."""
        ids = np.asarray(pages, dtype=np.int32)
        if not len(ids):
            return
        self._expect(ids, source)
        self._owner[ids] = target

    def free(self, pages: PageIds | Sequence[int], owner: int) -> None:
        """Gives pages back; all of them must be ``owner``'s and none may come twice."""
        ids = np.asarray(pages, dtype=np.int32)
        if not len(ids):
            return
        self._expect(ids, owner)
        if self._repeats(ids):
            raise LedgerError(f"{self._name(owner)} frees a page twice in one call: {sorted(ids.tolist())}")
        self._owner[ids] = FREE
        self._free[self._num_free : self._num_free + len(ids)] = ids
        self._num_free += len(ids)

    def owned_by(self, owner: int) -> PageIds:
        """The pages of an owner, in order of id."""
        return np.flatnonzero(self._owner == owner).astype(np.int32)

    def epochs(self, pages: PageIds | Sequence[int]) -> npt.NDArray[np.int64]:
        """How often each of these pages has been allocated so far."""
        epochs: npt.NDArray[np.int64] = self._epoch[np.asarray(pages, dtype=np.int32)]
        return epochs

    def check(self) -> None:
        """Compares the free stack with the owners.

        Raises:
            LedgerError: They disagree.
        """
        stack = self._free[: self._num_free]
        if self._repeats(stack) or not bool((self._owner[stack] == FREE).all()):
            raise LedgerError("the free stack holds a page twice or a page that is owned")
        if int((self._owner == FREE).sum()) != self._num_free:
            raise LedgerError("a page is neither owned nor free")

    def check_owners(self, owners: PageIds, used: int) -> None:
        """Compares the ledger with who holds which page.

        Args:
            owners: int32 [num_pages], the owner of each page as found outside.
            used: How many holdings were found.

        Raises:
            LedgerError: They disagree.
        """
        self.check()
        wrong = np.flatnonzero(self._owner != owners)
        if len(wrong):
            page = int(wrong[0])
            held, known = self._name(int(owners[page])), self._name(int(self._owner[page]))
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
            raise LedgerError(
                f"page {page} belongs to {self._name(int(self._owner[page]))}, not to {self._name(owner)}"
            )

    def _name(self, owner: int) -> str:
        return self._names.get(owner, f"the request in slot {owner}")
