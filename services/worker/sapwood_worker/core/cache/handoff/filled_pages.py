"""Pages that a step fills of prompts that are handed off. They go to the second tier while the step computes, layer by layer, and
other workers read them there.

To name the pages and to find room for them takes milliseconds. It is done when the step has been launched, so that the device
does not wait for it.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

from sapwood_worker.core.cache.handoff.leases import HandoffLeases
from sapwood_worker.core.cache.host.host_pages import HostPages
from sapwood_worker.core.cache.host.host_stores import Batch, HostStores
from sapwood_worker.core.cache.page_key import PageChain
from sapwood_worker.records.page_copies import PageCopy, PageIds


class ChunkPages(NamedTuple):
    """Pages of one prompt.

    Attributes:
        serial: The request.
        chain: The names of its pages so far.
        prompt: All of its tokens.
        first: The first of these pages.
        pages: int32 [1 + windows, n]: all of them on the device.
    """

    serial: int
    chain: PageChain
    prompt: array[int]
    first: int
    pages: PageIds


class FilledPages:
    """Implements :class:`~sapwood_worker.records.page_copies.LatePages`.

    Args:
        host: The second tier.
        stores: The copies to it.
        leases: Offers the pages to other workers.

    Attributes:
        chosen: The copy of all pages that found room; None: of none, or none yet.
    """

    def __init__(self, host: HostPages, stores: HostStores, leases: HandoffLeases) -> None:
        self._host = host
        self._stores = stores
        self._leases = leases
        self._chunks: list[ChunkPages] = []
        self._taken = False
        self.chosen: PageCopy | None = None

    def add(self, chunk: ChunkPages) -> None:
        """Adds pages of one more prompt."""
        self._chunks.append(chunk)

    def take(self) -> PageCopy | None:
        if not self._taken:
            self._taken = True
            self.chosen = self._store()
            self._chunks = []
        return self.chosen

    def _store(self) -> PageCopy | None:
        batch = Batch()
        for serial, chain, prompt, first, pages in self._chunks:
            chain.extend(prompt, len(prompt))
            self._leases.offer_pages(serial, chain.keys)
            names = chain.pages[first : first + pages.shape[1]]
            place = {name.key: index for index, name in enumerate(names)}
            for entry in self._host.reserve(names):
                page, *windows = pages[:, place[entry.key]].tolist()
                entry.coming = True
                self._stores.add(batch, entry, page, windows)
        return self._stores.begin(batch)
