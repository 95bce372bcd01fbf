"""Splits long products and experts into chunks: while one chunk is all-reduced over the ranks, the next is computed.

If a norm reads the sums next, the layer does not wait for the last chunks. The work after the norm is computed chunk by chunk
too, each after its sum, so that sums also overlap with the next layer's products. Only the first and the last sum of a step
overlap with nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor

CutKind = Literal["products", "layers of experts"]
"""A kind of work with a table of its own: a product, or the part of a layer with experts after its attention."""
Cuts = Sequence[tuple[int, int]]
"""Into how many chunks rows are cut: pairs of the least number of rows and the number of chunks, ascending by rows."""

_FEWEST_ROWS = 256
"""The fewest rows of a chunk in trials of the number of chunks."""
_FEWEST_OF: dict[CutKind, int] = {"products": 2, "layers of experts": 8}
"""The fewest rows that are tried, as a multiple of the above; each chunk of experts reads all experts."""
_MOST_ROWS = 8192
"""The most rows that are tried."""
_COUNTS = (1, 2, 4)
_CLEARLY = 0.95
"""More chunks are used only if they take at most this share of the seconds of fewer chunks."""


class Aside(Protocol):
    """Runs calls one after another, in parallel with other computation."""

    def __call__(self, call: Callable[[], object]) -> Callable[[], object]:
        """Begins a call that reads all results computed so far. Returns a function that makes later computation wait for the
        call's results."""
        ...


class SideThread:
    """A separate thread, on a CPU. Implements :class:`Aside`."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="sums")

    def __call__(self, call: Callable[[], object]) -> Callable[[], object]:
        return self._executor.submit(torch.inference_mode()(call)).result


class SideStream:
    """A separate CUDA stream, also during graph capture. Implements :class:`Aside`.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        # If both streams have blocks to run, the sum's blocks come first, because other ranks wait for them.
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def __call__(self, call: Callable[[], object]) -> Callable[[], object]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            call()
        event = self._stream.record_event()
        return lambda: torch.cuda.current_stream().wait_event(event)


class Coming:
    """A residual to which sums must still be added, chunk by chunk.

    Args:
        residual: [T, N].
        pieces: For each chunk of its rows, in order, a function that waits for the sum and returns it.

    Attributes:
        residual: The argument; complete once all pieces have been taken.
    """

    def __init__(self, residual: Tensor, pieces: Sequence[tuple[Tensor, Callable[[], object]]]) -> None:
        self.residual = residual
        self._left = list(zip(pieces, residual.split_with_sizes([len(part) for part, _ in pieces]), strict=True))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each chunk, and the rows that its receiver adds it to."""
        while self._left:
            (part, wait), rows = self._left.pop(0)
            wait()
            yield part, rows

    def settle(self) -> None:
        """Adds the chunks that have not been taken."""
        for part, rows in self:
            rows += part


class Overlap:
    """Cuts products along their rows, and sums chunks while others are computed.

    Args:
        sums: Sums a tensor over the ranks, in place; all make the same calls in the same order.
        aside: Runs the sums.

    Attributes:
        summed: How many chunks were summed so far.
        whole: Whether nothing is cut for now, as what is computed needs to know a row's place in the step.
    """

    def __init__(self, sums: Callable[[Tensor], object], aside: Aside) -> None:
        self._sums, self._aside = sums, aside
        self._tables: dict[CutKind, Cuts] = {}
        self._coming: Coming | None = None
        self.summed = 0
        self.whole = False

    def cut(self, table: Cuts, kind: CutKind = "products") -> None:
        """Sets into how many chunks a kind of work is cut."""
        self._tables[kind] = table

    @property
    def words(self) -> str:
        """The numbers of chunks for each kind of work, for people; empty: nothing is cut."""
        found = []
        for kind, table in self._tables.items():
            said = [f"of {rows} tokens and more in {count} pieces" for rows, count in table if count > 1]
            found += [f"{kind} {', '.join(said)}"] if said else []
        return "; beside ".join(found)

    def pieces(self, rows: int, kind: CutKind = "products") -> int:
        """Into how many chunks this many rows are cut."""
        if self.whole:
            return 1
        return next((count for least, count in reversed(self._tables.get(kind, ())) if rows >= least), 1)

    def run(
        self,
        product: Callable[[Tensor], Tensor],
        pieces: Iterable[Tensor],
        residual: Tensor | None,
        *,
        left: bool = False,
    ) -> Tensor:
        """The sum of ``product`` over the ranks, added to ``residual`` in place if there is one.

        Args:
            product: Gives this rank's part, row by row: [T, K] -> [T, N], a new tensor.
            pieces: The inputs, [T, K] together; each is read after the products of the earlier ones have been started.
            residual: [T, N].
            left: Whether to leave the last sums running, in :meth:`coming`; this needs a residual.
        """
        parts: list[Tensor] = []
        waits: list[Callable[[], object]] = []
        for piece in pieces:
            parts.append(product(piece))
            waits.append(self._aside(partial(self._sums, parts[-1])))
        self.summed += len(parts)
        if residual is None:
            for wait in waits:
                wait()
            return torch.cat(parts)
        self._coming = Coming(residual, list(zip(parts, waits, strict=True)))
        if not left:
            self.settle()
        return residual

    def coming(self, residual: Tensor) -> Coming | None:
        """What is still to be added to this residual; the caller adds it. None: nothing."""
        found = self._coming
        if found is None or found.residual is not residual:
            return None
        self._coming = None
        return found

    def settle(self) -> None:
        """Completes a residual whose sums were left under way."""
        if self._coming is not None:
            self._coming.settle()
            self._coming = None


def sizes_tried(most: int, kind: CutKind = "products") -> list[int]:
    """The row counts that are measured for :func:`best_table`, if steps have at most this many tokens; ascending."""
    sizes: list[int] = []
    while (size := _FEWEST_OF[kind] * _FEWEST_ROWS << len(sizes)) <= min(most, _MOST_ROWS):
        sizes.append(size)
    return sizes


def counts_tried(rows: int) -> list[int]:
    """The numbers of chunks that are tried for this many rows."""
    return [count for count in _COUNTS if rows // count >= _FEWEST_ROWS]


def best_table(seconds: Sequence[tuple[int, int, float]], captured: int = 0) -> list[tuple[int, int]]:
    """The table for :meth:`Overlap.cut`.

    Args:
        seconds: The measured seconds for a number of rows and a number of chunks, in their order.
        captured: Up to this many rows run in CUDA graphs. Their times do not predict larger steps, which the host launches.
    """
    table: list[tuple[int, int]] = []
    found: dict[int, tuple[int, float]] = {}
    for rows, count, each in seconds:
        if rows not in found or each <= _CLEARLY * found[rows][1]:
            found[rows] = count, each
    replayed = {rows: count for rows, (count, _) in found.items() if rows <= captured}
    launched = {rows: count for rows, (count, _) in found.items() if rows > captured}
    for rows, count in [*replayed.items(), *([(captured + 1, 1)] if replayed else []), *launched.items()]:
        if count != (table[-1][1] if table else 1):
            table.append((rows, count))
    return table
