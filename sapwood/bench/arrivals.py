"""When requests of an open loop are sent, in seconds after the start. They continue for ever."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator


def poisson(rate: float, seed: int) -> Iterator[float]:
    """Independent requests, ``rate`` of them a second on average."""
    draw = random.Random(f"arrivals {seed}")
    at = 0.0
    while True:
        at += draw.expovariate(rate)
        yield at


def constant(rate: float) -> Iterator[float]:
    """``rate`` requests a second at equal distances, the first at once."""
    return (number / rate for number in itertools.count())
