"""Copies from the device to the second tier: from the choice of a page to the report that its copy has ended.

Pages are copied in batches. A batch is either waiting for the coming step, or under way until the runner reports its number.
Until then its device pages are *being stored*: whoever is about to overwrite one of them has to wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from sapwood_worker.core.cache.host.host_pages import HostPage
from sapwood_worker.records.page_copies import LatePages, PageCopy, PageIds


@dataclass(slots=True)
class Batch:
    """Pages that are copied together.

    Attributes:
        device: The pages on the device.
        windows: Each of these pages in every window, -1: not there.
        host: The second tier's entries that they are copied to.
        unwanted: Whether the copies are to be forgotten once they are there.
    """

    device: list[int] = field(default_factory=list)
    windows: list[list[int]] = field(default_factory=list)
    host: list[HostPage] = field(default_factory=list)
    unwanted: bool = False


class HostStores:
    """The batches that have not ended.

    Attributes:
        waiting: The batch that goes with the coming step.
        epoch_of: How often a device page has been allocated.
    """

    def __init__(self) -> None:
        self.waiting = Batch()
        self.epoch_of: Callable[[int], int] = lambda page: 0
        self._under_way: dict[int, Batch] = {}
        self._storing: Counter[int] = Counter()
        self._begun = 0

    @property
    def busy(self) -> bool:
        """Whether any page is being stored."""
        return bool(self._storing)

    def is_storing(self, page: int) -> bool:
        """Whether a device page is being stored."""
        return page in self._storing

    def is_storing_any(self, pages: PageIds) -> bool:
        """Whether any of these device pages is being stored."""
        return self.busy and not self._storing.keys().isdisjoint(pages.tolist())

    def add(self, batch: Batch, entry: HostPage, page: int, windows: list[int]) -> None:
        """Adds a device page to a batch; ``windows`` is the same page in each window."""
        entry.device = page, self.epoch_of(page)
        batch.device.append(page)
        batch.windows.append(windows)
        batch.host.append(entry)
        self._storing[page] += 1

    def begin(self, batch: Batch) -> PageCopy | None:
        """Has a batch under way; returns its copy, for the runner. None: the batch is empty."""
        if not batch.device:
            return None
        number, self._begun = self._begun, self._begun + 1
        self._under_way[number] = batch
        windows = np.array(batch.windows, np.int32).T
        host = np.array([entry.page for entry in batch.host], np.int32)
        return PageCopy(number, np.array(batch.device, np.int32), host, tuple(windows))

    def begin_waiting(self) -> PageCopy | None:
        """As :meth:`begin`, of all that waits."""
        batch, self.waiting = self.waiting, Batch()
        return self.begin(batch)

    def end(self, number: int) -> Batch:
        """Takes a batch out whose copy has ended, well or not."""
        batch = self._under_way.pop(number)
        self._storing -= Counter(batch.device)
        return batch

    def during(self, step: LatePages) -> Batch | None:
        """The batch of the pages that a step fills; None: there is none, or it has ended."""
        return None if step.chosen is None else self._under_way.get(step.chosen.number)

    def forget(self) -> list[HostPage]:
        """Drops what waits, and what is under way as soon as it has ended; returns the entries that waited."""
        for batch in self._under_way.values():
            batch.unwanted = True
        batch, self.waiting = self.waiting, Batch()
        self._storing -= Counter(batch.device)
        return batch.host

    def check(self) -> set[int]:
        """The host pages that are to be written; for tests.

        Raises:
            AssertionError: The pages being stored were miscounted.
        """
        batches = [*self._under_way.values(), self.waiting]
        assert Counter(page for batch in batches for page in batch.device) == self._storing
        return {entry.page for batch in batches for entry in batch.host}
