"""The series of a metric: added to on hot paths and from any thread, read by anybody who renders the page."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, Protocol

_MOST_KEPT = 256
"""Values of a histogram that are not in their buckets yet."""


class Series(Protocol):
    """One series."""

    def add_to(self, page: Any, labels: Sequence[str]) -> None:
        """Adds its present values to the metrics page.

        Args:
            page: The metric on the page: one of ``prometheus_client.core``.
            labels: The series' label values.
        """


class Counter:
    """A number that only grows."""

    __slots__ = ("_lock", "_value")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Adds an amount."""
        with self._lock:
            self._value += amount

    def add_to(self, page: Any, labels: Sequence[str]) -> None:
        page.add_metric(labels, self._value)


class Gauge(Counter):
    """A number that goes up and down."""

    __slots__ = ()

    def dec(self, amount: float = 1.0) -> None:
        """Takes an amount away."""
        self.inc(-amount)

    def set(self, value: float) -> None:
        """Replaces the number."""
        self._value = value


class Histogram:
    """Values by size. They are put into their buckets many at a time, and when the page is rendered: a tenth of
    prometheus-client's time for each, which takes two locks and looks at every bucket below.

    Args:
        bounds: The largest value of each bucket, ascending; one for larger values comes after them.
    """

    __slots__ = ("_bounds", "_counts", "_kept", "_lock", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = (*map(float, bounds), float("inf"))
        self._counts = [0.0] * len(self._bounds)
        self._kept: list[float] = []
        self._lock = threading.Lock()
        self._sum = 0.0

    def observe(self, amount: float) -> None:
        """Adds a value."""
        kept = self._kept
        kept.append(amount)
        if len(kept) >= _MOST_KEPT:
            with self._lock:
                self._sort_in()

    def observe_all(self, amounts: Iterable[float]) -> None:
        """Adds each value."""
        self._kept.extend(amounts)
        if len(self._kept) >= _MOST_KEPT:
            with self._lock:
                self._sort_in()

    def add_to(self, page: Any, labels: Sequence[str]) -> None:
        with self._lock:
            self._sort_in()
            counts, total = tuple(accumulate(self._counts)), self._sum
        names = [str(bound) for bound in self._bounds[:-1]] + ["+Inf"]
        page.add_metric(labels, list(zip(names, counts, strict=True)), total)

    def _sort_in(self) -> None:
        """The caller holds the lock, so that no other thread removes values."""
        count = len(self._kept)  # others may add more meanwhile
        values = sorted(self._kept[:count])
        del self._kept[:count]
        begin = 0
        for number, bound in enumerate(self._bounds):
            end = bisect_right(values, bound, begin)
            self._counts[number] += end - begin
            begin = end
        self._sum += sum(values)
