"""The tiles of the experts' products: by a model, or as they were measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class TileShape(NamedTuple):
    """How a tile of the matrix is multiplied: its columns, how much of K at a time, warps and stages of the pipeline."""

    width: int
    depth: int
    warps: int
    stages: int


class TilePlan(NamedTuple):
    """The tiles of a layer's two products.

    Attributes:
        height: Places of a tile; 1: nothing is sorted, each pair is multiplied by itself.
        gate_up: The first product's.
        down: The second's.
    """

    height: int
    gate_up: TileShape
    down: TileShape


HEIGHTS = (16, 32, 64, 128)
FEW_TOKENS = 16
"""Tokens up to which pairs by themselves are worth measuring."""
_LOW = (TileShape(64, 128, 4, 3), TileShape(64, 64, 4, 6), TileShape(64, 128, 4, 4), TileShape(128, 64, 4, 4))
_STORED = TileShape(64, 64, 4, 3)
_ALONE = (
    TileShape(1, 2048, 4, 1), TileShape(8, 256, 8, 1), TileShape(2, 1024, 2, 1), TileShape(2, 1024, 4, 1),
    TileShape(2, 256, 4, 1), TileShape(4, 256, 8, 1),
)  # fmt: skip
_TALL = (TileShape(128, 64, 8, 3), TileShape(256, 64, 8, 3), TileShape(128, 64, 4, 4), TileShape(64, 64, 4, 6))


def tile_height(pairs: int, experts: int) -> int:
    """Places of a tile, for this many pairs of tokens and experts, from 16 to 128: what an expert has on average, and a third
    more, so that few experts need a second tile."""
    return next((height for height in HEIGHTS if 4 * pairs <= 3 * height * experts), HEIGHTS[-1])


def tile_shapes(height: int, *, stored: bool = False) -> tuple[TileShape, TileShape]:
    """The other sizes of tiles of this height, unless measured: of the first product and of the second.

    Args:
        height: Places of a tile.
        stored: Whether matrices are in few bits: widened in registers; a tile may not take too many of these.
    """
    if height == 1:
        return _ALONE[0], _ALONE[4 if stored else 1]
    if height < 64 and stored:
        return _STORED, _STORED
    if height < 128 and not stored:
        return _LOW[0], _LOW[1]
    tall = _TALL[2 if height == 64 else 0 if stored else 1]
    return tall, tall


def modelled_tiles(pairs: int, experts: int, *, stored: bool = False, filled: int = 0) -> TilePlan:
    """Tiles for this many pairs of tokens and experts, by the average number of pairs for each expert; None if few pairs share an
    expert.

    Args:
        pairs: Of tokens and experts.
        experts: How many there are.
        stored: As for :func:`tile_shapes`.
        filled: Pairs of more than which a tile has 32 places at least: all tokens go to some of the experts; 0: to none.
    """
    height = 1 if (4 if stored else 3) * pairs <= experts else tile_height(pairs, experts)
    if filled and pairs > filled:
        height = max(height, 32)
    return TilePlan(height, *tile_shapes(height, stored=stored))


def candidates(pairs: int, experts: int, chosen: int, *, stored: bool = False) -> dict[int, tuple[TileShape, ...]]:
    """The tiles worth measuring, by height: the modelled height and its neighbours, and for few tokens each pair separately.

    Args:
        pairs: Of tokens and experts.
        experts: How many there are.
        chosen: How many a token goes to.
        stored: As for :func:`tile_shapes`, whose shapes are among these.
    """
    low = (_STORED, *_LOW) if stored else _LOW
    at = HEIGHTS.index(tile_height(pairs, experts))
    heights = HEIGHTS[max(at - 1, 0) : at + 2]
    alone = {1: _ALONE} if pairs <= FEW_TOKENS * chosen else {}
    half = _TALL if stored else (*_LOW[:1], *_TALL)  # of a height of 64; the second of the low ones is among the tall
    return alone | {height: low if height < 64 else half if height == 64 else _TALL for height in heights}


@dataclass(frozen=True, slots=True)
class TileTable:
    """The tiles of a layer for any number of pairs.

    Attributes:
        experts: How many there are.
        measured: By pairs of tokens and experts the fastest that was measured.
        stored: Whether any of its matrices are in few bits.
        filled: As :func:`modelled_tiles` has it.
    """

    experts: int
    measured: Mapping[int, TilePlan] = field(default_factory=dict)
    stored: bool = False
    filled: int = 0

    def plan(self, pairs: int) -> TilePlan:
        """The tiles of the nearest number that was measured, if that is at most twice as many or half; else the modelled ones."""
        if self.measured:
            nearest = min(self.measured, key=lambda each: abs(math.log2(each / pairs)))
            if pairs <= 2 * nearest and nearest <= 2 * pairs:
                return self.measured[nearest]
        return modelled_tiles(pairs, self.experts, stored=self.stored, filled=self.filled)
