"""Cuts shared runs of keys into pieces of work: which program reads which keys for which requests. On the host."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sapwood_kernels.attention.planned import IntArray, SharedRuns

SLOTS = 16
"""The most parts of a request's result that come from shared runs."""
FIELDS = 8
"""Numbers of an item: its place in ``order``, its requests, the request whose pages are read, its first key, the position after
its last, its slot; two are spare."""
_LEAST = 256
"""Fewest keys of an item, unless a run has fewer: what is written and read again for it costs about as much as eight keys."""
_WAVES = 2
"""Programs for each multiprocessor that a batch is to be cut into, about."""


class SharedItems(NamedTuple):
    """The work.

    Attributes:
        items: int32 [N, ``FIELDS``].
        starts: int64 [B]: how many keys of each request the items read; the others are its own.
        counts: int64 [B]: in how many slots, from 0 up, they leave parts of its result.
    """

    items: npt.NDArray[np.int32]
    starts: IntArray
    counts: IntArray


def cut_runs(
    runs: SharedRuns, *, page_size: int, tile: int, kv_heads: int, processors: int, most: int, slots: int = SLOTS
) -> SharedItems:
    """The items of some runs: each a stretch of a run's keys for at most ``tile`` of its requests.

    A run that would have too many items, or need too many slots, is not shared, and neither are the runs that follow it: its
    requests read them by themselves. O(requests + items).

    Args:
        runs: The shared runs of pages.
        page_size: Tokens in a page.
        tile: Requests of an item.
        kv_heads: Programs of an item.
        processors: The device's multiprocessors.
        most: The most items.
        slots: The most parts of a request's result.
    """
    tiles = -(-runs.count // tile)
    work = int((tiles * (runs.end - runs.begin)).sum()) * kv_heads
    stretch = -(-max(_LEAST, work // (_WAVES * processors)) // page_size) * page_size
    starts, counts = [0] * len(runs.order), [0] * len(runs.order)
    order = runs.order.tolist()
    items: list[tuple[int, ...]] = []
    for first, count, begin, end, parts in zip(
        runs.first.tolist(), runs.count.tolist(), runs.begin.tolist(), runs.end.tolist(), tiles.tolist(), strict=True
    ):
        one = order[first]
        used = counts[one]
        pieces = min(-(-(end - begin) // stretch), slots - used)
        if starts[one] != begin or pieces < 1 or len(items) + pieces * parts > most:
            continue
        share = -(-(end - begin) // (pieces * page_size)) * page_size
        slot = used
        for at in range(begin, end, share):
            keys = one, at, min(at + share, end), slot, 0, 0
            items += [(place, min(tile, first + count - place), *keys) for place in range(first, first + count, tile)]
            slot += 1
        for member in order[first : first + count]:
            starts[member], counts[member] = end, slot
    every = np.array(items, np.int32).reshape(-1, FIELDS)
    return SharedItems(every, np.array(starts, np.int64), np.array(counts, np.int64))
