"""Checks that the prefix cache's rows, tree, ledger and windows agree, and the second tier's pages with what uses them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sapwood_worker.core.cache.host.host_pages import HostPages
from sapwood_worker.core.cache.page_allocator import (
    CACHE,
    FREE,
    TRANSFER,
    LedgerError,
    PageAllocator,
    PageHandle,
    PageIds,
)
from sapwood_worker.core.cache.page_table import PageTable
from sapwood_worker.core.cache.pins import Pins
from sapwood_worker.core.cache.radix_node import Node
from sapwood_worker.core.cache.radix_tree import RadixTree
from sapwood_worker.core.cache.window_pages import WindowPages


@dataclass(slots=True)
class Row:
    """An open row of the page table.

    Attributes:
        node: The locked end of its shared prefix.
        shared: Pages of that prefix.
        loading: The pages that are being filled from the tiers below.
        windows: Those of each window.
    """

    node: Node
    shared: int
    loading: PageHandle | None = None
    windows: tuple[PageIds, ...] = ()


def check_idle(
    allocator: PageAllocator,
    tree: RadixTree,
    pins: Pins,
    rows: Mapping[int, Row],
    windows: Sequence[WindowPages],
    taken: int,
) -> None:
    """Checks that nothing but ``taken`` pages is held while no row is open; vectorised, O(pages).

    Raises:
        AssertionError: A page leaked or a lock was left behind; the message names the requests.
    """
    allocator.check()
    assert not rows, f"rows {sorted(rows)} are open, though nothing runs"
    nodes = pins.nodes()
    pinned = sum(len(node.pages) for node in nodes)
    if tree.num_evictable + pinned != tree.num_pages:
        locked = [node.pages for node in tree.nodes() if node.locks and node not in nodes]
        raise LedgerError(f"a lock was left behind on pages {allocator.describe(np.concatenate(locked))}")
    if allocator.num_used != tree.num_pages + taken:
        cached = np.concatenate([np.empty(0, np.int32), *(node.pages for node in tree.nodes())])
        leaked = np.setdiff1d(allocator.used(), cached)
        raise LedgerError(f"nothing runs, yet there are pages {allocator.describe(leaked)}")
    for nth, window in enumerate(windows):
        window.check_idle(sum(map(len, pins.held(nth))))


def check_pages(
    allocator: PageAllocator,
    table: PageTable,
    tree: RadixTree,
    pins: Pins,
    rows: Mapping[int, Row],
    windows: Sequence[WindowPages],
    taken: Sequence[int],
) -> None:
    """Compares tree, ledger, rows and the pages that are taken, page by page; for tests.

    Raises:
        AssertionError: They disagree.
    """
    ends: dict[Node, int] = {}
    owners = np.full(allocator.num_pages, FREE, dtype=np.int32)
    held = 0
    for slot, row in rows.items():
        ends[row.node] = ends.get(row.node, 0) + 1
        pages = table.pages(slot)
        at: Node | None = row.node
        end = row.shared
        while at is not None and at.parent is not None:
            start = end - len(at.pages)
            assert start >= 0 and (pages[start:end] == at.pages).all(), f"row {slot} does not begin with its prefix"
            end, at = start, at.parent
        assert end == 0, f"row {slot} does not begin with the prefix it locks"
        loading = pages[:0] if row.loading is None else row.loading.pages
        loaded = row.shared + len(loading)
        assert (pages[row.shared : loaded] == loading).all(), f"row {slot} is not filled where it should be"
        owners[loading] = TRANSFER
        owners[pages[loaded:]] = slot
        held += len(pages) - row.shared
    for node in pins.ends():
        ends[node] = ends.get(node, 0) + 1
    cached = tree.check(ends)
    owners[cached] = CACHE
    owners[taken] = TRANSFER
    # The counts agree too, so that no page stands in two places.
    allocator.check_owners(owners, held + len(cached) + len(taken))
    begun = {slot: table.pages(slot)[: row.shared] for slot, row in rows.items()}
    for nth, window in enumerate(windows):
        moving = {slot: each[each >= 0] for slot, row in rows.items() for each in row.windows[nth : nth + 1]}
        window.check(begun, moving, pins.held(nth), cached)


def check_host(host: HostPages, writing: set[int], fetching: int, pins: Mapping[int, int], putting: int) -> None:
    """Compares the second tier's pages with those that are written from the device, how many are fetched, how often each is
    pinned, and how many pins are of pages on their way to the third tier; for tests.

    Raises:
        AssertionError: They disagree.
    """
    host.check()
    unready = {entry.page for entry in host.entries() if not entry.ready}
    assert writing <= unready and len(unready) == len(writing) + fetching, "a host page waits for nobody"
    extra = [entry.pins - pins.get(entry.page, 0) for entry in host.entries()]
    assert min(extra, default=0) >= 0 and sum(extra) == putting, "pins are not balanced"
