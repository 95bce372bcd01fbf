"""The two orders of a page's content: the ranks' parts side by side, and as one rank would keep it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sapwood_worker.records.kv_layout import KVLayout

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class RankPart:
    """What a rank keeps of a page.

    Attributes:
        start: Where its part begins in the content.
        layout: Its stage's layers, and its heads of them.
        rank: Which of the tensor-parallel ranks of its stage it is.
        ranks: How many there are.
    """

    start: int
    layout: KVLayout
    rank: int
    ranks: int


class PageOrder:
    """Goes from one order to the other.

    A layer's part of a page is ``[part][head][slot][dim]``, so a range of heads is one piece in each of them. Where ranks keep
    the same head, all have it.

    Args:
        whole: The layout of one rank that keeps everything, in the order HND.
        parts: The part of each rank that has bytes of its own.

    Attributes:
        object_bytes: Bytes of a page's content as one rank would keep it.
    """

    def __init__(self, whole: KVLayout, parts: Sequence[RankPart]) -> None:
        self.object_bytes = whole.page_bytes
        # For each component of each part: how many pieces it has (its layers times a layer's parts); where it begins among the
        # ranks' parts, and a piece's bytes there; where it begins in the whole, a piece's bytes there (of all heads), and where
        # the part's own heads begin among these.
        self._pieces: list[tuple[int, int, int, int, int, int]] = []
        offsets = whole.offsets()
        for part in parts:
            at = part.layout.offsets()
            for all_heads, own in zip(whole.components, part.layout.components, strict=True):
                if not own.layers:
                    continue
                first, count = own.layers[0], len(own.layers) * own.parts
                piece = part.layout.layer_bytes(own) // own.parts
                width = whole.layer_bytes(all_heads) // own.parts
                each = width // all_heads.heads
                head = 0 if own.sharding == "replicated" else part.rank * all_heads.heads // part.ranks
                self._pieces.append((count, part.start + at[first], piece, offsets[first], width, head * each))

    def gather(self, content: Bytes, into: Bytes) -> None:
        """Writes the content, uint8 of the ranks' parts, as one rank would keep it: uint8 [object_bytes]."""
        for own, whole in self._views(content, into):
            whole[:] = own

    def spread(self, content: Bytes, kept: Bytes | None = None) -> None:
        """Writes what one rank would keep as the content: the ranks' parts side by side.

        Args:
            content: uint8 of all parts; written.
            kept: uint8 [object_bytes]; None: it is in the first bytes of the content.
        """
        kept = content[: self.object_bytes].copy() if kept is None else kept
        for own, whole in self._views(content, kept):
            own[:] = whole

    def _views(self, content: Bytes, whole: Bytes) -> list[tuple[Bytes, Bytes]]:
        """The same bytes in both orders, uint8 [layers * parts, bytes of a rank's heads]; views."""
        return [
            (
                content[start : start + count * piece].reshape(count, piece),
                whole[there : there + count * width].reshape(count, width)[:, head : head + piece],
            )
            for count, start, piece, there, width, head in self._pieces
        ]
