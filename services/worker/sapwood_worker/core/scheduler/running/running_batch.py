"""The running requests and their rows of the page table."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sapwood_worker.core.cache.page_table import PageTable
from sapwood_worker.core.cache.prefix_cache import PrefixCache, Written
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.state import RequestState


class RunningBatch:
    """Requests that have a row, by rank: the last one is the first to be retracted.

    Args:
        table: The page table.
        cache: Where pages come from and go to.
        page_size: Tokens in a page.
    """

    def __init__(self, table: PageTable, cache: PrefixCache, page_size: int) -> None:
        self._table = table
        self._cache = cache
        self._page_size = page_size
        self.requests: list[Request] = []

    def __len__(self) -> int:
        return len(self.requests)

    def pages_of(
        self, rows: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int32], Written]:
        """The pages of some rows up to those that hold the tokens before ``ends``, and handles of these last ones.

        The pages are a copy, int32 [rows, tables * most pages]; entries beyond a row's last page are undefined.
        """
        return self._cache.pages_of(rows, (ends - 1) // self._page_size)

    @property
    def num_free_slots(self) -> int:
        """How many more requests could run."""
        return self._table.num_free

    @property
    def num_pages(self) -> int:
        """All pages."""
        return self._cache.num_pages

    @property
    def num_available_pages(self) -> int:
        """Pages that could be given to requests now."""
        return self._cache.num_available

    def pages_for(self, tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-tokens // self._page_size)

    def pages_to_start(self, request: Request) -> int:
        """Pages that would no longer be available if the request started: new ones, and cached ones that it would lock."""
        found, unlocked = self._cache.probe(request.reusable, request.namespace)
        return self.pages_for(len(request.token_ids)) - found + unlocked

    def tokens_gained(self, request: Request, others: Sequence[Request]) -> int:
        """How many more tokens the request would find in the cache once one of the others has computed all of its own."""
        others = [other for other in others if other.namespace == request.namespace]
        if not self._cache.enabled or not others:
            return 0
        start = self._cache.probe(request.reusable, request.namespace)[0] * self._page_size
        first_page = request.token_ids[start : start + self._page_size]
        most = 0
        for other in others:
            limit = min(len(request.reusable) - 1, len(other.token_ids))
            if start >= limit or first_page != other.token_ids[start : start + self._page_size]:
                continue
            mine, theirs = (np.frombuffer(tokens, np.uint32, limit) for tokens in (request.token_ids, other.token_ids))
            differing = mine != theirs
            common = int(differing.argmax()) if differing.any() else limit
            most = max(most, common // self._page_size * self._page_size - start)
        return most

    def windows_fit(self, tokens: int) -> bool:
        """Whether every window has pages for one more request of so many tokens, beside what those running may need."""
        return all(each.needed(tokens) + each.outstanding() <= each.num_available for each in self._cache.scarce)

    def start(self, request: Request, expected: int = 0) -> None:
        """Gives a request a row, its cached pages, and pages for the rest of its known tokens.

        There must be a free slot and as many pages as :meth:`pages_to_start` says; :meth:`windows_fit` for ``expected`` tokens.
        """
        request.become(RequestState.RUNNING)
        request.slot = self._table.open()
        request.enters = True
        request.computed = self._cache.open(
            request.slot, request.request_id, request.reusable, request.namespace, expected
        )
        missing = self.pages_for(len(request.token_ids)) - self._table.length(request.slot)
        allocated = self._cache.allocate(request.slot, missing)
        assert allocated, f"request {request.request_id} was started without pages for it"
        request.computed += self._cache.load(request.slot)
        request.planned = request.computed
        request.capacity = self.capacity(request)
        request.reach = self._cache.reach(request.slot)
        insort(self.requests, request, key=lambda other: other.rank)

    def capacity(self, request: Request) -> int:
        """Tokens that the pages of a running request hold."""
        return self._table.length(request.slot) * self._page_size

    def make_room(self, request: Request, tokens: int) -> bool:
        """Gives a request pages for so many tokens, and pages of windows for the next that it computes; returns False if there
        are not enough."""
        if tokens > request.capacity:
            missing = self.pages_for(tokens) - self._table.length(request.slot)
            if not self._cache.allocate(request.slot, missing):
                return False
            request.capacity += missing * self._page_size
        if request.planned >= request.reach:
            request.reach = self._cache.extend(request.slot, request.planned + 1, request.computed)
        return request.planned < request.reach

    def draftable(self, request: Request, count: int, *, further: bool = False) -> int:
        """How many of so many tokens after its next one a request has pages for, once it was given what there was.

        Args:
            request: The request.
            count: The tokens.
            further: Give it pages for a draft as long after them, too, unless others may need them soon.
        """
        start = request.planned + 1
        self._widen(request, start + count, 0)
        if further:
            self._widen(request, min(start + 2 * count + 2, request.max_length), len(self.requests))
        return max(0, min(self.reachable(request, 1 + count) - 1, request.capacity - start))

    def _widen(self, request: Request, tokens: int, left: int) -> None:
        """Gives a request pages for so many tokens if ``left`` others remain."""
        if tokens > request.capacity:
            missing = self.pages_for(tokens) - self._table.length(request.slot)
            if missing + left <= self._cache.num_available and self._cache.allocate(request.slot, missing):
                request.capacity += missing * self._page_size

    def reachable(self, request: Request, count: int) -> int:
        """Gives a request pages of windows for its next ``count`` tokens; returns for how many of them it then has pages."""
        end = request.planned + count
        if end > request.reach:
            request.reach = self._cache.extend(request.slot, end, request.computed, share=True)
        return min(count, request.reach - request.planned)

    def commit(self, request: Request) -> None:
        """Puts the full pages of a request's computed tokens into the prefix cache."""
        # After an abort with steps in flight, more tokens are computed than known.
        known = len(request.token_ids)
        self._cache.commit(request.slot, request.token_ids, min(request.computed, known))

    def stop(self, request: Request, state: RequestState, *, keep: bool = True) -> None:
        """Takes a request's row; its pages stay in the cache, unlocked, unless ``keep`` is false.

        No step in flight may compute it.
        """
        assert not request.in_flight, f"request {request.request_id} is still being computed"
        if keep:
            self.commit(request)
        self._cache.close(request.slot)
        self._table.close(request.slot)
        self.requests.remove(request)
        request.slot = -1
        request.capacity = request.reach = 0
        request.computed = request.planned = request.unknown = 0
        request.become(state)
