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

# What follows a layer's name: of GPTQ and AWQ, compressed-tensors, and float8.
_BY_COLUMNS = ("qweight", "qzeros", "scales")
_PACKED = ("qweight", "qzeros", "weight_zero_point")
_SCALES = ("weight_scale", "weight_scale_inv")
_SHARED = ("g_idx", "weight_g_idx", "weight_shape")


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a file.

    Attributes:
        path: The file.
        stored: The tensor's name there.
        rows: Which outputs of the projections that it holds; None: it is a tensor of its own.
    """

    path: Path
    stored: str
    rows: Span | None = None

    def part(self, shape: Sequence[int]) -> tuple[int, Span] | None:
        """The dimension along which the stored tensor is cut and what is ours of it; None: all of it.

        That depends on the format, for weights, biases, scales and zeros alike: in some outputs are columns, in some a word holds
        several outputs.

        Raises:
            ConfigError: It has another number of outputs than the projections that it should hold.
        """
        rows, kind = self.rows, self.stored.rpartition(".")[2]
        if rows is None or kind in _SHARED or not shape or shape[0] == 1:
            return None
        dim = 1 if kind in _BY_COLUMNS else 0
        if len(shape) == 3:  # of all experts, transposed
            dim = 2
        count = shape[dim] if len(shape) > dim else 0
        if count == rows.total:
            return dim, rows
        each = _outputs_each(kind, count, rows.total)
        if each and rows.start % each == 0 and (rows.size % each == 0 or rows.start + rows.size == rows.total):
            return dim, Span(rows.start // each, -(-rows.size // each), count)
        raise ConfigError(
            f"{self.path}: tensor {self.stored} has shape {list(shape)}, "
            f"of which no parts are those of {rows.total} rows that the configuration asks for"
        )


def _outputs_each(kind: str, count: int, total: int) -> int:
    """How many outputs an entry stands for; 0: they do not fit."""
    if kind in _PACKED:
        each = total // max(count, 1)
        return each if each in (4, 8) and each * count == total else 0
    return BLOCK if kind in _SCALES and count == -(-total // BLOCK) else 0


def places(name: str, path: Path, stored: str, fused: FusedRows) -> Iterator[tuple[str, Place]]:
    """Our names of what a stored tensor holds, each with its place.

    Args:
        name: Our name of the whole.
        path: The file.
        stored: The tensor's name there.
        fused: Projections that are stored as one tensor.
    """
    name += "."
    whole = next((each for each in fused if f".{each}." in name), None)
    if whole is None:
        yield name[:-1], Place(path, stored)
        return
    start, total = 0, sum(fused[whole].values())
    for part, size in fused[whole].items():
        yield name.replace(f".{whole}.", f".{part}.")[:-1], Place(path, stored, Span(start, size, total))
        start += size
