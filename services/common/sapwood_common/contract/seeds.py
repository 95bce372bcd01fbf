"""Seeds for requests that bring none, and for several continuations of one prompt.

A router that resumes continuation i alone elsewhere asks for one continuation with the seed that :func:`child_seed` gives for i.
"""

from __future__ import annotations

from xxhash import xxh3_64_intdigest

from sapwood_common.random_bytes import random_bytes


def child_seed(seed: int, index: int) -> int:
    """The seed of continuation ``index``, of 64 bits: a pure function of both; continuation 0 has ``seed`` itself."""
    if index == 0:
        return seed
    return xxh3_64_intdigest(index.to_bytes(8, "little"), seed & (1 << 64) - 1)


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
