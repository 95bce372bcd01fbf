"""Pages that a step fills of prompts that are handed off: to name them and to find room for them takes milliseconds, for which
the device does not wait if it is done once the step has been launched."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

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
        fill: Chooses the copies of all of them.

    Attributes:
        chosen: What was chosen; None: nothing was, yet or for want of room.
    """

    def __init__(self, fill: Callable[[Sequence[ChunkPages]], PageCopy | None]) -> None:
        self._fill = fill
        self._chunks: list[ChunkPages] = []
        self._taken = False
        self.chosen: PageCopy | None = None

    def add(self, serial: int, chain: PageChain, prompt: array[int], first: int, pages: PageIds) -> None:
        """One more prompt's."""
        self._chunks.append(ChunkPages(serial, chain, prompt, first, pages))

    def take(self) -> PageCopy | None:
        if not self._taken:
            self._taken = True
            self.chosen = self._fill(self._chunks)
            self._chunks = []
        return self.chosen
