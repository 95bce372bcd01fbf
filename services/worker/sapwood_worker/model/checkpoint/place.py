"""Where a checkpoint keeps one of our tensors: in a stored tensor, or in rows of one that holds several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sapwood_common.errors import ConfigError
from sapwood_worker.model.families.fused import FusedRows
from sapwood_worker.model.weight_slot import Span

BLOCK = 128
"""Rows, and columns, of a weight that share a scale where scales are for blocks."""


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a file.

    Attributes:
        path: The file.
        stored: The tensor's name there.
        rows: Which of the rows of a projection's weight; None: it is a tensor of its own.
    """

    path: Path
    stored: str
    rows: Span | None = None

    def span(self, shape: Sequence[int]) -> Span | None:
        """The rows of the stored tensor, be it a weight, a bias or scales of rows or blocks; None: all of it.

        Raises:
            ConfigError: It has another number of rows than the projections that it should hold.
        """
        rows = self.rows
        if rows is None or not shape or shape[0] == 1:
            return None
        if shape[0] == rows.total:
            return rows
        if shape[0] == -(-rows.total // BLOCK) and rows.start % BLOCK == rows.size % BLOCK == 0:
            return Span(rows.start // BLOCK, rows.size // BLOCK, shape[0])
        raise ConfigError(
            f"{self.path}: tensor {self.stored} has shape {list(shape)}, the configuration asks for {rows.total} rows"
        )


def places(name: str, path: Path, stored: str, fused: FusedRows) -> Iterator[tuple[str, Place]]:
    """Our names of what a stored tensor holds, each with its place.

    Args:
        name: Our name of the whole.
        path: The file.
        stored: The tensor's name there.
        fused: Projections that are stored as one tensor.
    """
    whole = next((each for each in fused if f".{each}." in name), None)
    if whole is None:
        yield name, Place(path, stored)
        return
    start, total = 0, sum(fused[whole].values())
    for part, size in fused[whole].items():
        yield name.replace(f".{whole}.", f".{part}."), Place(path, stored, Span(start, size, total))
        start += size
