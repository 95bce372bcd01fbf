"""How much of host pages is there while a step is still filling them: some layers after others."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

Ranges = list[tuple[int, int]]
"""Bytes of a page's content: where each run begins and ends."""


class PageParts:
    """The pages that one step fills. The step's side tells, others wait."""

    def __init__(self) -> None:
        self._told = threading.Condition()
        self._computed = 0
        self._copied = 0

    def computed(self) -> None:
        """One more group of layers is in each of the device's pages. For any thread."""
        with self._told:
            self._computed += 1
            self._told.notify_all()

    def copied(self) -> None:
        """One more group of layers is in each host page, too. For any thread."""
        with self._told:
            self._copied += 1
            self._told.notify_all()

    def beyond(self, known: int, seconds: float, *, on_device: bool = False) -> int:
        """How many groups are there: more than ``known``, unless for so many seconds there were none. For any thread.

        Args:
            known: So many are known of.
            seconds: How long to wait at most.
            on_device: Whether it is about the device's pages, not the host's.
        """

        def there() -> int:
            return self._computed if on_device else self._copied

        with self._told:
            self._told.wait_for(lambda: there() > known, seconds)
            return there()


class PartsOfPages:
    """The parts that steps fill, by page. The step's thread changes it, others look.

    Attributes:
        groups: The ranges of bytes in a page's content that belong to each group of layers, in the order in which steps compute
            them; empty: nothing is known of a step's pages before it ends.
    """

    def __init__(self) -> None:
        self.groups: list[Ranges] = []
        self._of: dict[int, PageParts] = {}

    def begin(self, pages: Iterable[int]) -> PageParts:
        """Pages that a step fills."""
        parts = PageParts()
        self._of.update(dict.fromkeys(pages, parts))
        return parts

    def end(self, pages: Iterable[int], parts: PageParts) -> None:
        """No step fills these any more."""
        for page in pages:
            if self._of.get(page) is parts:
                del self._of[page]

    def of(self, page: int) -> PageParts | None:
        """What is filling a page now; None: nothing is, or it has not begun."""
        return self._of.get(page)


def layer_groups(layers: Sequence[int], most: int) -> list[list[int]]:
    """Cuts layers, in the order in which they are computed, into at most so many groups, and at least two where there are two
    layers.

    The last layer is alone: nothing is computed beside its copy, so that should be short.
    """
    *others, last = sorted(layers)
    parts = np.array_split(np.array(others), min(most - 1, len(others))) if others else []
    return [*(part.tolist() for part in parts), [last]]


def ranges_of(layers: Iterable[int], offsets: Mapping[int, int], sizes: Mapping[int, int]) -> Ranges:
    """The ranges of some layers' bytes in a page's content, given where each layer begins there and how many bytes it has."""
    ranges: Ranges = []
    for layer in sorted(layers, key=offsets.__getitem__):
        start, end = offsets[layer], offsets[layer] + sizes[layer]
        if ranges and ranges[-1][1] == start:
            start, _ = ranges.pop()
        ranges.append((start, end))
    return ranges
