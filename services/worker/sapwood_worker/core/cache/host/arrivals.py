"""Pages that are read from elsewhere into host pages while the request that lacks them waits: from a store, or another worker.

Host pages are reserved for a read, and given back only when the read has ended, however it ends. What passed its check is an
ordinary page of the second tier, pinned until the request starts. Bound: arrivals hold at most ``share`` of the host pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from sapwood_worker.core.cache.host.host_pages import HostPage
from sapwood_worker.core.cache.page_key import PageName


@dataclass(slots=True, eq=False)
class Arrival:
    """The pages that one request waits for.

    Attributes:
        wanted: What they hold, in order; those before index ``cursor`` are not being read any more.
        began: When the first was asked for, by the clock.
        deadline: When the request stops waiting.
        looking: Whether it is still unknown which of them can be read.
        ended: When the last came.
        cancelled: Whether the request has started or ended.
        pinned: The pages that have come.
    """

    wanted: list[PageName]
    began: float
    deadline: float
    looking: bool = False
    ended: float = 0.0
    cancelled: bool = False
    cursor: int = 0
    pinned: list[HostPage] = field(default_factory=list)


A = TypeVar("A", bound=Arrival)


class ArrivalPages(Protocol):
    """Pages that are read into, as :class:`~sapwood_worker.core.cache.host.host_pages.HostPages` has them."""

    @property
    def num_pages(self) -> int:
        """How many there are."""
        ...

    def reserve(self, wanted: Sequence[PageName]) -> list[HostPage]:
        """Entries to be written."""
        ...

    def written(self, entries: Sequence[HostPage]) -> None:
        """Makes reserved entries ready."""
        ...

    def abandon(self, entries: Sequence[HostPage]) -> None:
        """Frees reserved entries whose content did not come."""
        ...

    def pin(self, entries: Sequence[HostPage]) -> None:
        """Keeps entries that are ready; pins count."""
        ...

    def unpin(self, entries: Sequence[HostPage]) -> None:
        """Takes one pin back from each."""
        ...


class Arrivals(Generic[A]):
    """The ledger of such pages. Single-threaded.

    Args:
        host: The pages.
        share: The most of them that arrivals hold at once.
        clock: Seconds, monotonic.

    Attributes:
        held: The requests that wait.
    """

    def __init__(self, host: ArrivalPages, share: float, clock: Callable[[], float]) -> None:
        self.held: set[int] = set()
        self._host = host
        self._limit = int(share * host.num_pages)
        self._clock = clock
        self._arrivals: dict[int, A] = {}
        self._reading: set[bytes] = set()
        self._occupied = 0

    def __getitem__(self, serial: int) -> A:
        return self._arrivals[serial]

    @property
    def reading(self) -> int:
        """Host pages that are reserved for reads that have not ended."""
        return len(self._reading)

    @property
    def limit(self) -> int:
        """Host pages that arrivals may hold at once."""
        return self._limit

    @property
    def room(self) -> int:
        """Host pages that arrivals may still take."""
        return max(0, self._limit - self._occupied)

    def add(self, serial: int, arrival: A) -> None:
        """Begins one; :meth:`settle` ends it. The request waits if it is in ``held``, too."""
        self._arrivals[serial] = arrival

    def reserve(self, wanted: Sequence[PageName]) -> list[HostPage]:
        """Host pages to read into, for those of ``wanted`` that are neither there nor being read for another request."""
        entries = self._host.reserve(wanted[: self.room])
        self._occupied += len(entries)
        self._reading.update(entry.key.hash for entry in entries)
        return entries

    def came(self, arrival: A, batch: list[HostPage], good: list[bool]) -> int:
        """Takes the end of a read into reserved pages; returns how many of them passed their check, as ``good`` says."""
        arrived = [entry for entry, fine in zip(batch, good, strict=True) if fine]
        self._reading.difference_update(entry.key.hash for entry in batch)
        self._host.written(arrived)
        self._host.abandon([entry for entry, fine in zip(batch, good, strict=True) if not fine])
        self._host.pin(arrived)
        if arrival.cancelled:
            self._occupied -= len(batch)
            self._host.unpin(arrived)
        else:
            self._occupied -= len(batch) - len(arrived)
            arrival.pinned += arrived
            arrival.ended = self._clock()
        return len(arrived)

    def settle(self, serial: int) -> tuple[int, float, float] | None:
        """Keeps nothing any longer for a request that has started or ended.

        Returns:
            How many pages came, and when the first was asked for and the last had come, by the clock; None: no pages.
        """
        arrival = self._arrivals.pop(serial, None)
        self.held.discard(serial)
        if arrival is None:
            return None
        arrival.cancelled = True
        count = self.let_go(arrival)
        return (count, arrival.began, arrival.ended) if count else None

    def let_go(self, arrival: A) -> int:
        """Unpins what has come so far, which may be evicted from now on; returns how many pages that were."""
        count = len(arrival.pinned)
        self._host.unpin(arrival.pinned)
        self._occupied -= count
        arrival.pinned = []
        return count

    def move(self, serial: int, to: int) -> A:
        """Gives what arrives for one request to another; returns it."""
        arrival = self._arrivals[to] = self._arrivals.pop(serial)
        return arrival

    def release(self, is_over: Callable[[A], bool]) -> list[int]:
        """The requests that need not wait any longer; they do not wait from now on."""
        released = [serial for serial in self.held if is_over(self._arrivals[serial])]
        self.held.difference_update(released)
        return released

    def is_reading(self, arrival: A) -> bool:
        """Whether any page of it is still being read, for this or another request."""
        while arrival.cursor < len(arrival.wanted) and not arrival.looking:
            if arrival.wanted[arrival.cursor].key.hash in self._reading:
                return True
            arrival.cursor += 1
        return arrival.looking

    def pins(self) -> dict[int, int]:
        """Compares the counts with what is held; returns how often each host page is pinned. For tests.

        Raises:
            AssertionError: They disagree.
        """
        pins = count_pins(arrival.pinned for arrival in self._arrivals.values())
        assert self._occupied == sum(pins.values()) + len(self._reading), "pages that arrive were miscounted"
        assert self._occupied <= self._limit, "arrivals hold more than their share"
        assert self.held <= self._arrivals.keys()
        return pins


def count_pins(pinned: Iterable[list[HostPage]]) -> dict[int, int]:
    """How often each host page is pinned."""
    count: dict[int, int] = {}
    for entries in pinned:
        for entry in entries:
            count[entry.page] = count.get(entry.page, 0) + 1
    return count
