"""Pulled pages that are cached on the device and not stored yet: some with each step, and none with the one that begins their
request. To launch all of their copies at once would keep its first token waiting, and those that others wait for."""

from __future__ import annotations

import numpy as np

from sapwood_worker.core.cache.page_allocator import PageIds

_A_STEP = 64


class AdoptedPages:
    """The pages.

    Attributes:
        pages: By page whether it came after the last step was planned; in their order.
    """

    def __init__(self) -> None:
        self.pages: dict[int, bool] = {}

    def add(self, pages: PageIds) -> None:
        """Pages have come."""
        self.pages.update(dict.fromkeys(pages.tolist(), True))

    def forget(self, pages: PageIds) -> None:
        """Pages are about to be given to another owner."""
        for page in pages.tolist() if self.pages else ():
            self.pages.pop(page, None)

    def take(self) -> PageIds:
        """Removes and returns what is to be stored with the coming step."""
        due = np.array([page for page, new in self.pages.items() if not new][:_A_STEP], np.int32)
        self.pages = dict.fromkeys(self.pages, False)
        self.forget(due)
        return due
