"""A transfer for tests: stores end late, in any order, or fail; it reads a page only when its store ends.

So anybody who overwrites a page that is still being stored, or uses a host page that is not there yet, gets wrong content.
"""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt

from sapwood_worker.model.pools.host_pool import HostPool
from sapwood_worker.records.step import Copies, CopyReport, PageCopy


class FakeTransfer:
    """Implements :class:`~sapwood_worker.model.pools.torch_transfer.Transfer` between numpy arrays.

    Args:
        pools: [num_pages, ...] each: the device's pools, one for each page table.
        host: The host pool; a page holds one of each pool.
        chance: Decides what is late and what fails; None: all is done at once.
        failure_rate: Share of stores that fail.
    """

    def __init__(
        self,
        pools: list[npt.NDArray[np.int64]],
        host: HostPool,
        chance: random.Random | None = None,
        failure_rate: float = 0.0,
    ) -> None:
        self._pools = [pool.reshape(len(pool), -1) for pool in pools]
        self._host = host
        half = host.page_bytes // 2
        host.parts.groups = [[(0, half)], [(half, host.page_bytes)]]
        self._chance = chance
        self._failure_rate = failure_rate
        self._running: list[PageCopy] = []
        self._done: list[int] = []
        self._failed: list[int] = []
        self._during: PageCopy | None = None

    def start(self, copies: Copies) -> None:
        if copies.store is not None:
            self._running.append(copies.store)
        if copies.fence or self._chance is None:
            self._end(len(self._running))
        if copies.during is not None and (during := copies.during.take()) is not None:
            self._during = during
            self._parts = self._host.parts.begin(during.host.tolist())
        if copies.load is not None:
            for group, pool in enumerate(self._pools):
                pages, places = copies.load.of(group)
                pool[pages] = self._content(group)[places]

    def written(self) -> None:
        """The step has filled its pages: the first half of each is copied."""
        if self._during is not None:
            self._parts.computed()
            self._copy(self._during, *self._host.parts.groups[0][0])
            self._parts.copied()

    def finish(self, *, failed: bool = False) -> None:
        if (during := self._during) is not None:
            self._during = None
            if failed or (self._chance is not None and self._chance.random() < self._failure_rate):
                self._failed.append(during.number)
            else:
                self._parts.computed()
                self._copy(during, *self._host.parts.groups[1][0])
                self._parts.copied()
                self._done.append(during.number)
            self._host.parts.end(during.host.tolist(), self._parts)

    def _copy(self, copy: PageCopy, start: int, end: int) -> None:
        """Copies these bytes of each page's content."""
        content = np.concatenate([pool[copy.of(group)[0]] for group, pool in enumerate(self._pools)], axis=1)
        self._host.content[copy.host, start:end] = content.view(np.uint8)[:, start:end]

    def poll(self) -> CopyReport:
        if self._chance is not None and self._running:
            self._chance.shuffle(self._running)
            self._end(self._chance.randint(0, len(self._running)))
        report = CopyReport(tuple(self._done), tuple(self._failed))
        self._done, self._failed = [], []
        return report

    @property
    def busy(self) -> bool:
        return bool(self._running or self._done or self._failed)

    def _end(self, count: int) -> None:
        ending, self._running = self._running[:count], self._running[count:]
        for copy in ending:
            if self._chance is not None and self._chance.random() < self._failure_rate:
                for group in range(len(self._pools)):
                    self._content(group)[copy.host] = -7
                self._failed.append(copy.number)
            else:
                for group, pool in enumerate(self._pools):
                    pages, places = copy.of(group)
                    self._content(group)[places] = pool[pages]
                self._done.append(copy.number)

    def _content(self, group: int) -> npt.NDArray[np.int64]:
        width = self._pools[0].shape[1]
        return self._host.content.view(np.int64)[:, group * width : (group + 1) * width]
