"""The interface between the prefix cache and the tiers below it, and the tiers' counters. Does not depend on how they keep
pages."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sapwood_worker.core.cache.page_key import PageName
from sapwood_worker.core.cache.pages import PageIds, WindowPages
from sapwood_worker.core.cache.transfer.reads import DeviceRoom


@dataclass(slots=True)
class TierCounters:
    """What has happened since the start.

    Attributes:
        device_hits: Pages found in the first tier when a request started.
        host_hits: Pages found in the second tier and not in the first.
        stored: Pages copied to the second tier.
        store_failures: Pages whose copy to the second tier failed.
        no_room: Pages not copied because the second tier had no free or evictable page.
        fences: Steps that had to wait for the stores before them.
        store_seconds: Seconds that copies to the second tier took.
        load_seconds: Seconds that copies from it took.
    """

    device_hits: int = 0
    host_hits: int = 0
    stored: int = 0
    store_failures: int = 0
    no_room: int = 0
    fences: int = 0
    store_seconds: float = 0.0
    load_seconds: float = 0.0


class LowerTiers(Protocol):
    """The tiers below the prefix cache, as the prefix cache calls them. All methods except ``evicted`` and ``dropped`` concern
    one row."""

    def open(self, slot: int, token_ids: array[int], namespace: bytes, pages: PageIds) -> None:
        """For a row that begins with these cached pages, keeps the further pages of ``token_ids`` that the tiers have."""
        ...

    def kept(self, slot: int) -> int:
        """How many pages :meth:`open` kept for a row."""
        ...

    def load(self, slot: int, pages: PageIds, windows: tuple[PageIds, ...]) -> None:
        """Fills the row's next pages, those that :meth:`open` kept, before the coming step computes. ``windows`` has the same
        pages of each window, -1 where the row has none."""
        ...

    def loaded(self, slot: int) -> None:
        """Notes that the step that filled the pages of :meth:`load` is done."""
        ...

    def cached(self, slot: int, token_ids: array[int], start: int, pages: PageIds, new: PageIds) -> None:
        """Notes that the row's pages from entry ``start`` on are cached now, as ``pages``; ``new`` are those just added."""
        ...

    def close(self, slot: int) -> None:
        """Frees what is kept for a row that ends."""
        ...

    def adopted(self, names: Sequence[PageName], pages: PageIds) -> None:
        """Notes that ``pages``, filled by a KV transfer, are cached now under these names."""
        ...

    def beside(self, windows: Sequence[WindowPages], epoch_of: Callable[[int], int], room: DeviceRoom) -> None:
        """Called once, with the window pages that belong to a cached page and are stored and loaded with it; a function that
        returns how often a page was allocated; and the room from which KV transfers take pages."""
        ...

    def evicted(self, pages: PageIds) -> None:
        """Copies pages that it wants to keep before they get another owner; their content is still in place."""
        ...

    def dropped(self, pages: PageIds) -> None:
        """Forgets pages that are about to get another owner; their content is not kept."""
        ...
