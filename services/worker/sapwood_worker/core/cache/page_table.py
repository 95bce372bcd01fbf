"""Which pages hold the KV of which request, in order of position."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class PageTable:
    """One row of page ids for each running request.

    Attributes:
        rows: int32 [max_running, max_pages]; entry i of a row holds positions ``i * page_size`` .. ``(i + 1) * page_size - 1``.
            Entries beyond a row's length are undefined.

    Args:
        max_running: Rows.
        max_pages: The most pages one request can have.
    """

    def __init__(self, max_running: int, max_pages: int) -> None:
        self.rows: npt.NDArray[np.int32] = np.zeros((max_running, max_pages), dtype=np.int32)
        self._lengths = [0] * max_running
        self._free_slots = list(range(max_running - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Rows that no request has."""
        return len(self._free_slots)

    def open(self) -> int:
        """Takes an empty row; returns its slot."""
        slot = self._free_slots.pop()
        self._lengths[slot] = 0
        return slot

    def close(self, slot: int) -> None:
        """Gives a row back; its pages must have been taken care of."""
        assert slot not in self._free_slots
        self._lengths[slot] = 0
        self._free_slots.append(slot)

    def length(self, slot: int) -> int:
        """Pages in a row."""
        return self._lengths[slot]

    def pages(self, slot: int, start: int = 0) -> npt.NDArray[np.int32]:
        """A view of a row's pages from entry ``start`` on; valid until the row is written."""
        return self.rows[slot, start : self._lengths[slot]]

    def append(self, slot: int, pages: npt.NDArray[np.int32] | Sequence[int]) -> None:
        """Adds pages at the end of a row."""
        start = self._lengths[slot]
        self.rows[slot, start : start + len(pages)] = pages
        self._lengths[slot] = start + len(pages)

    def replace(self, slot: int, start: int, pages: npt.NDArray[np.int32] | Sequence[int]) -> None:
        """Overwrites entries from ``start`` on; the row keeps its length."""
        assert start + len(pages) <= self._lengths[slot]
        self.rows[slot, start : start + len(pages)] = pages
