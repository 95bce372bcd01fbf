"""Random numbers that are a pure function of (seed, position, number).

Algorithm: the output function of SplitMix64 (Steele, Lea and Flood, 2014) applied twice, first to the seed, then to that
plus the position times the golden ratio, and the number times another odd constant. No state, so a request draws the same
numbers in any batch and after a restart.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def uniform(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.float64]:
    """So many numbers in [0, 1) with 53 random bits for each pair: float64 [R, count].

    Args:
        seeds: uint64 [R].
        positions: int64 [R].
        count: How many.
    """
    # The hash relies on wrap-around.
    with np.errstate(over="ignore"):
        pairs = _mix(seeds + _GOLDEN) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        mixed = _mix(pairs[:, None] + np.arange(count, dtype=np.uint64) * _SECOND)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * _FIRST
    value = (value ^ (value >> np.uint64(27))) * _SECOND
    return value ^ (value >> np.uint64(31))
