"""Snapshots of the states of layers that keep one for each request instead of keys and values.

A request's own state is in the slot of its row. A snapshot is a copy of it after some whole pages of tokens, from which another
request with the same beginning continues. It lies *beside* the tree's page that ends there, as the pages of windows do
(``pages.py``), so a split of a node does not concern it, and it goes when that page goes.

Where snapshots are taken: where the tree showed that a request branches off, and where a waiting request branches off one that
runs; at the last page before the end of the input; in long inputs at up to ``_CUTS`` places between; and while a request decodes
at each page, or each ``_STRIDE`` tokens if pages are smaller. Of the last kind a request keeps the latest only.

Eviction (GreedyDual-Size with frequency; Young, 1994, Cao and Irani, 1997, Cherkasova, 1998): a snapshot is worth the tokens that
would be computed again without it, back to the snapshot before it, times how often it was asked for. All snapshots have the
same size. The clock is the worth of what was evicted last, and counts from there. So old snapshots give way, and a new one is
not taken in the place of one that is worth more; then the clock advances by the new one's share, so that this ends. A snapshot
that has exactly one other behind it is worth nothing until it is asked for: the text has gone on, and requests continue from its
end or from where they branch.

Invariants: a slot is owned by nobody, by the row that fills it, or by the cache, beside exactly one page of the tree. A snapshot
that a row continues from, or that a pin holds, is not evicted. Complexity: O(pages of the prefix) to match and O(slots) to evict,
both vectorised. Bound: one entry for each slot, and a few positions for each row.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sapwood_worker.core.cache.pages import CACHE, FREE, LedgerError, PageAllocator

PageIds = npt.NDArray[np.int32]

_LEAST_GAP = 16
"""A snapshot that would save fewer tokens than this is not taken."""
_STRIDE = 64
"""Tokens of output between snapshots: each costs as much memory traffic as the state costs a step of its request."""
_LEAST_CUT, _CUTS = 1024, 8
"""Long inputs have a snapshot each time so many tokens, but at most so many."""
_MOST_WANTED = 8
"""The most places in a request at which waiting requests branch off."""


@dataclass(slots=True)
class _Row:
    """The snapshots of an open row.

    Attributes:
        source: The snapshot that it continues from, until its state has been copied; -1: none.
        origin: The page beside which that lies or lay; -1: none.
        last: After how many tokens its latest snapshot is, taken or found.
        wanted: Token counts at which others branch off.
        saving: Snapshots that steps in flight take, by the count of tokens.
        saved: Those that have been taken, but whose page is not in the tree yet.
    """

    source: int
    origin: int
    last: int
    wanted: set[int] = field(default_factory=set)
    saving: dict[int, int] = field(default_factory=dict)
    saved: dict[int, int] = field(default_factory=dict)


class StateSnapshots:
    """The snapshots of one prefix cache.

    Args:
        count: Slots for snapshots.
        page_size: Tokens in a page.
        num_cached: Pages that the tree may hold.

    Attributes:
        num_slots: Slots for snapshots.
        ledger: Who owns them.
        num_taken: Snapshots taken so far.
        num_evicted: How many were evicted in favour of others.
    """

    def __init__(self, count: int, page_size: int, num_cached: int) -> None:
        self.num_slots = count
        self.ledger = PageAllocator(count)
        self.num_taken = self.num_evicted = 0
        self._page_size = page_size
        self._stride = page_size * -(-_STRIDE // page_size)
        # For each page of the tree its snapshot, and the reverse; for each snapshot, how many rows and pins hold it.
        self._beside = np.full(num_cached, -1, np.int32)
        self._of = np.full(count, -1, np.int32)
        self._users = np.zeros(count, np.int32)
        # For each snapshot in the cache: tokens since the one before it, which one that is, how often it was asked for, and its
        # rank in eviction; infinite for slots that the cache does not own.
        self._gap = np.zeros(count, np.int64)
        self._before = np.full(count, -1, np.int32)
        self._asked = np.zeros(count, np.int64)
        self._rank = np.full(count, np.inf)
        self._clock = 0.0
        self._rows: dict[int, _Row] = {}

    @property
    def num_used(self) -> int:
        """Slots that rows or the cache hold."""
        return self.ledger.num_used

    def usable(self, pages: PageIds) -> int:
        """How many of a cached prefix's pages end at or before its last snapshot."""
        found = np.flatnonzero(self._beside[pages] >= 0)
        return int(found[-1]) + 1 if len(found) else 0

    def hold(self, pages: PageIds) -> PageIds:
        """Keeps the snapshot at the end of a prefix from eviction; :meth:`let_go` takes that back. Empty if there is none."""
        mine = self._beside[pages[-1:]]
        mine = mine[mine >= 0]
        self._users[mine] += 1
        return mine

    def let_go(self, held: PageIds) -> None:
        """Takes :meth:`hold` back."""
        self._users[held] -= 1
        assert not len(held) or self._users[held].min() >= 0, "let go more often than held"

    def open(self, slot: int, name: str, pages: PageIds) -> int:
        """Begins a row with the last snapshot of its cached prefix, which is held until :meth:`enter`.

        Args:
            slot: The row.
            name: What to call its owner in errors.
            pages: The tree's pages of the prefix, usable or not: where they end, requests branch.

        Returns:
            How many pages the state covers.
        """
        self.ledger.name(slot, name)
        count = self.usable(pages)
        origin = int(pages[count - 1]) if count else -1
        source = int(self._beside[origin]) if count else -1
        row = self._rows[slot] = _Row(source, origin, count * self._page_size)
        if len(pages) > count:
            row.wanted.add(len(pages) * self._page_size)
        if count:
            self._users[source] += 1
            self._asked[source] += 1
            self._value(source)
        return count

    def enter(self, slot: int) -> int:
        """The snapshot that a row's state is copied from in the coming step; -1: it begins with zeros."""
        row = self._rows[slot]
        source, row.source = row.source, -1
        if source >= 0:
            self._users[source] -= 1
        return source

    def want(self, slot: int, tokens: int) -> None:
        """Asks for a snapshot of a running request after this many tokens, a multiple of the page, which it has not computed."""
        row = self._rows[slot]
        if len(row.wanted) < _MOST_WANTED:
            row.wanted.add(tokens)

    def coming(self, slot: int, planned: int, prompt: int) -> list[int]:
        """After how many tokens a running request's snapshots are or will be that others cannot find yet.

        Args:
            slot: Its row.
            planned: Its tokens that are computed, or will be by steps in flight.
            prompt: Tokens of its input.
        """
        row = self._rows[slot]
        later = self._positions(row, planned, prompt, prompt)
        return sorted({*row.saving, *row.saved, *later})

    def plan(self, slot: int, start: int, end: int, prompt: int) -> list[tuple[int, int]]:
        """The snapshots that a step takes of a row, as far as there is room.

        Args:
            slot: The row.
            start, end: The step computes its tokens from ``start`` to ``end``.
            prompt: Tokens of its input.

        Returns:
            For each the count of tokens, ascending, and the snapshot's slot.
        """
        row = self._rows[slot]
        found: list[tuple[int, int]] = []
        for tokens in sorted(self._positions(row, start, end, prompt)):
            gap = tokens - row.last
            if gap < _LEAST_GAP:
                continue
            snapshot = self._take(slot, gap)
            if snapshot < 0:
                continue
            row.saving[tokens] = snapshot
            row.last = tokens
            found.append((tokens, snapshot))
        row.wanted = {tokens for tokens in row.wanted if tokens > end}
        return found

    def took(self, slot: int, tokens: int, prompt: int) -> None:
        """Takes note that a step has taken a snapshot of a row. It is found by others once the tree has the page that ends there.

        Args:
            slot: The row.
            tokens: Their count.
            prompt: Tokens of its input. Of snapshots after more than these only the latest is kept.
        """
        row = self._rows[slot]
        snapshot = row.saving.pop(tokens)
        if tokens > prompt:
            for older in [each for each in row.saved if prompt < each < tokens]:
                self.ledger.free([row.saved.pop(older)], slot)
        row.saved[tokens] = snapshot
        self.num_taken += 1

    def commit(self, slot: int, pages: PageIds) -> None:
        """Lets others find the snapshots of a row at the ends of these pages, the row's first, which are the tree's."""
        row = self._rows[slot]
        for tokens in sorted(row.saved):
            count = tokens // self._page_size
            if count > len(pages):
                break
            snapshot, page = row.saved.pop(tokens), int(pages[count - 1])
            if self._beside[page] >= 0:
                self.ledger.free([snapshot], slot)
                continue
            self.ledger.move([snapshot], slot, CACHE)
            above = self.usable(pages[: count - 1])
            self._before[snapshot] = self._beside[pages[above - 1]] if above else -1
            self._gap[snapshot] = (count - above) * self._page_size
            self._asked[snapshot] = 0
            self._beside[page], self._of[snapshot] = snapshot, page
            self._value(snapshot)
            before = int(self._before[snapshot])
            if before >= 0 and int((self._before == before).sum()) == 1:
                self._rank[before] = self._clock  # the text has gone on, and nothing branches off there

    def close(self, slot: int) -> None:
        """Ends a row: frees the snapshots that no page of the tree has got."""
        self.enter(slot)
        row = self._rows.pop(slot)
        self.ledger.free([*row.saving.values(), *row.saved.values()], slot)
        self.ledger.ended(slot)

    def evicted(self, pages: PageIds) -> None:
        """Frees the snapshots beside pages that leave the tree."""
        for snapshot in self._beside[pages][self._beside[pages] >= 0].tolist():
            self._forget(snapshot)

    def check_idle(self, held: int) -> None:
        """Checks that no row has a snapshot and that pins hold ``held``; raises AssertionError."""
        self.ledger.check()
        if self._rows or int(self._users.sum()) != held or self.num_used != int((self._beside >= 0).sum()):
            raise LedgerError("nothing runs, yet snapshots of states are used")

    def check(self, held: list[PageIds], cached: PageIds) -> None:
        """Compares ledger, rows and the snapshots of the tree's pages; for tests.

        Args:
            held: What pins hold.
            cached: All of the tree's pages.

        Raises:
            AssertionError: They disagree.
        """
        owners, users = np.full(self.num_slots, FREE, np.int32), np.zeros(self.num_slots, np.int32)
        count = 0
        for slot, row in self._rows.items():
            own = [*row.saving.values(), *row.saved.values()]
            owners[own] = slot
            count += len(own)
            if row.source >= 0:
                users[row.source] += 1
        for each in held:
            np.add.at(users, each, 1)
        there = np.flatnonzero(self._beside >= 0)
        mine = self._beside[there]
        assert np.isin(there, cached).all(), "a snapshot lies beside nothing"
        assert (self._of[mine] == there).all(), "snapshots lie beside pages wrongly"
        owners[mine] = CACHE
        self.ledger.check_owners(owners, count + len(mine))
        assert (users == self._users).all(), "users were miscounted"
        assert (np.isfinite(self._rank) == (owners == CACHE)).all(), "eviction does not know what the cache has"

    def _positions(self, row: _Row, start: int, end: int, prompt: int) -> set[int]:
        """After which counts of tokens, above ``start`` and at most ``end``, snapshots are due."""
        size = self._page_size
        found = {tokens for tokens in row.wanted if start < tokens <= end}
        last = (prompt - 1) // size * size
        if start < last <= end:
            found.add(last)
        if start < last:
            cut = max(_LEAST_CUT, -(-prompt // _CUTS))
            cut = -(-cut // size) * size
            found.update(range(start // cut * cut + cut, min(end, last) + 1, cut))
        if (latest := end // self._stride * self._stride) > max(start, prompt):
            found.add(latest)
        return found

    def _take(self, slot: int, gap: int) -> int:
        """A slot for a snapshot of a row that would save ``gap`` tokens; -1: all are worth more, or in use."""
        if not self.ledger.num_free:
            origin = self._rows[slot].origin
            known = int(self._beside[origin]) if origin >= 0 else -1
            if known >= 0 and not (self._before == known).any():
                self._rank[known] = self._clock  # what it goes on from will have one snapshot behind it
            rank = np.where(self._users > 0, np.inf, self._rank)
            victim = int(rank.argmin()) if self.num_slots else -1
            if victim < 0 or not np.isfinite(rank[victim]):
                return -1
            if rank[victim] > self._clock + gap:
                self._clock += gap / self.num_slots
                return -1
            self._clock = max(self._clock, float(rank[victim]))
            self._forget(victim)
            self.num_evicted += 1
        return int(self.ledger.allocate(1, slot)[0])

    def _value(self, snapshot: int) -> None:
        """Ranks a snapshot again."""
        self._rank[snapshot] = self._clock + self._gap[snapshot] * (1 + self._asked[snapshot])

    def _forget(self, snapshot: int) -> None:
        assert not self._users[snapshot], "a snapshot is evicted that somebody uses"
        below = np.flatnonzero(self._before == snapshot)
        self._before[below] = self._before[snapshot]
        self._gap[below] += self._gap[snapshot]
        self._rank[below] += self._gap[snapshot] * (1 + self._asked[below])
        self._beside[self._of[snapshot]] = self._of[snapshot] = self._before[snapshot] = -1
        self._rank[snapshot] = np.inf
        self.ledger.free([snapshot], CACHE)
