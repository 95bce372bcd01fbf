"""Long products of which ranks have parts, in pieces: while one is summed over the ranks, the next is multiplied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

_FEWEST_ROWS = 256
"""Rows of a piece, at least, where it is tried in how many a product is cut."""
_MOST_ROWS = 8192
"""Rows of the largest product that is tried."""
_COUNTS = (1, 2, 4)
_CLEARLY = 0.95
"""What more pieces are to take of fewer pieces' seconds, at most."""


class Aside(Protocol):
    """Runs calls beside what else is computed, one after another."""

    def __call__(self, call: Callable[[], object]) -> Callable[[], object]:
        """Begins a call that reads what was computed so far; what it returns has what is computed next see the call's results."""
        ...


class SideThread:
    """A thread of its own, on a CPU. Implements :class:`Aside`."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="sums")

    def __call__(self, call: Callable[[], object]) -> Callable[[], object]:
        return self._executor.submit(torch.inference_mode()(call)).result


class SideStream:
    """A CUDA stream of its own, also where a graph is captured. Implements :class:`Aside`.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        # Where both have blocks to run, those of the sum come first: other ranks wait for them.
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def __call__(self, call: Callable[[], object]) -> Callable[[], object]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            call()
        event = self._stream.record_event()
        return lambda: torch.cuda.current_stream().wait_event(event)


class Overlap:
    """Cuts products along their rows, and sums pieces while others are computed.

    Args:
        sums: Sums a tensor over the ranks, in place; all make the same calls in the same order.
        aside: Runs the sums.

    Attributes:
        summed: Pieces that were summed so far.
    """

    def __init__(self, sums: Callable[[Tensor], object], aside: Aside) -> None:
        self._sums, self._aside = sums, aside
        self._table: Sequence[tuple[int, int]] = ()
        self.summed = 0

    def cut(self, table: Sequence[tuple[int, int]]) -> None:
        """Tells in how many pieces products are cut: those of so many rows or more, ascending."""
        self._table = table

    @property
    def words(self) -> str:
        """In how many, for people; empty: they are not."""
        said = [f"of {rows} tokens and more in {count} pieces" for rows, count in self._table if count > 1]
        return "products " + ", ".join(said) if said else ""

    def pieces(self, rows: int) -> int:
        """In how many a product of so many rows is cut."""
        return next((count for least, count in reversed(self._table) if rows >= least), 1)

    def run(self, product: Callable[[Tensor], Tensor], x: Tensor, residual: Tensor | None, count: int) -> Tensor:
        """The sum of ``product(x)`` over the ranks, added to ``residual`` in place if there is one.

        Args:
            product: Gives this rank's part, row by row: [T, K] -> [T, N], a new tensor.
            x: [T, K].
            residual: [T, N].
            count: Pieces.
        """
        parts, waits = [], []
        for piece in x.tensor_split(count):
            parts.append(product(piece))
            waits.append(self._aside(partial(self._sums, parts[-1])))
        self.summed += count
        targets = [None] * count if residual is None else residual.tensor_split(count)
        for part, wait, target in zip(parts, waits, targets, strict=True):
            wait()
            if target is not None:
                target += part
        return torch.cat(parts) if residual is None else residual


def sizes_tried(most: int) -> list[int]:
    """Rows of the products by which :func:`best_table` chooses, where steps have so many tokens at most; ascending."""
    sizes: list[int] = []
    while (size := 2 * _FEWEST_ROWS << len(sizes)) <= min(most, _MOST_ROWS):
        sizes.append(size)
    return sizes


def counts_tried(rows: int) -> list[int]:
    """In how many pieces a product of so many rows is tried."""
    return [count for count in _COUNTS if rows // count >= _FEWEST_ROWS]


def best_table(seconds: Sequence[tuple[int, int, float]]) -> list[tuple[int, int]]:
    """What :meth:`Overlap.cut` takes, by the seconds of products of so many rows in so many pieces, in their order."""
    table: list[tuple[int, int]] = []
    found: dict[int, tuple[int, float]] = {}
    for rows, count, each in seconds:
        if rows not in found or each <= _CLEARLY * found[rows][1]:
            found[rows] = count, each
    for rows, (count, _) in found.items():
        if count != (table[-1][1] if table else 1):
            table.append((rows, count))
    return table
