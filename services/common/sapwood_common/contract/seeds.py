"""Seeds for requests that bring none."""

from __future__ import annotations

from sapwood_common.contract.child_seed import child_seed
from sapwood_common.random_bytes import random_bytes


class Seeds:
    """Draws seeds of 64 bits, one for each request.

    Args:
        start: None: seeds are random. Otherwise the n-th seed is a pure function of ``start`` and n, so a server that is started
            again and gets the same requests in the same order gives the same answers.
    """

    def __init__(self, start: int | None = None) -> None:
        self._start = start
        self._drawn = 0

    def draw(self) -> int:
        """The next seed."""
        if self._start is None:
            return int.from_bytes(random_bytes(8))
        self._drawn += 1
        return child_seed(self._start, self._drawn)


RANDOM_SEEDS = Seeds()
"""The seeds of a server that was started without ``--random-seed``: random ones."""
