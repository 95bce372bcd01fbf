"""The seeds of several continuations of one prompt.

A router that resumes continuation i alone elsewhere asks for one continuation with the seed that this gives for i.
"""

from __future__ import annotations

from xxhash import xxh3_64_intdigest


def child_seed(seed: int, index: int) -> int:
    """The seed of continuation ``index``, of 64 bits: a pure function of both; continuation 0 has ``seed`` itself."""
    if index == 0:
        return seed
    return xxh3_64_intdigest(index.to_bytes(8, "little"), seed & (1 << 64) - 1)
