"""The vision parts of LLaVA-NeXT and LLaVA-OneVision: the whole picture as a tile, then tiles of it in the resolution nearest to
its own, of whose tokens those of the border that was filled are left out; a token ends each row.

Sources: Liu et al., "LLaVA-NeXT", 2024; Li et al., "LLaVA-OneVision", 2024.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from sapwood_worker.model.vision.llava import TOWERS, LlavaVision
from sapwood_worker.model.vision.tower import VisionFamily, VisionFiles

_MOST_TILES = 64
_MORE = 1.1
"""OneVision makes the tokens of tiles fewer where they are more than its most by this factor, squared."""


class LlavaNextVision(LlavaVision):
    """The vision part of LLaVA-NeXT or LLaVA-OneVision.

    The layout of a picture: rows and columns of tiles, and rows and columns of tokens that were filled on either side. A picture
    of one tile has none.
    """

    def __init__(self, files: VisionFiles) -> None:
        config = dict(files.config)
        one_vision = config.get("model_type") == "llava_onevision"
        config.setdefault("vision_feature_layer", -1 if one_vision else -2)
        config.setdefault("vision_feature_select_strategy", "full" if one_vision else "default")
        super().__init__(VisionFiles(config, files.processor))
        if self.vision_tower.leads != self._skipped:
            raise ValueError("vision_feature_select_strategy does not fit the tower: each token must be of a patch")
        self.image_newline = nn.Parameter(torch.empty(int(files.text["hidden_size"])))
        self._most = 0
        if one_vision:
            ratio = str(config.get("vision_aspect_ratio", "anyres_max_9"))
            if not ratio.startswith("anyres_max_"):
                raise ValueError(f"vision_aspect_ratio {ratio!r:.40} is not supported")
            self._most = int(ratio.removeprefix("anyres_max_"))

    def count(self, shape: Sequence[int], layout: Sequence[int]) -> int:
        tiles, height, width = shape
        side, tokens = self.vision_tower.side, self.vision_tower.patches**2
        if (height, width) != (side, side):
            raise ValueError(f"tiles of {height} x {width} pixels; they have {side} x {side}")
        if not layout:
            if tiles != 1:
                raise ValueError(f"{tiles} tiles without a layout")
            return tokens + 1
        rows, columns = self._grid(tiles, layout)
        return tokens + rows * (columns + 1)

    def encode(self, pixels: Tensor, layout: Sequence[int]) -> Tensor:
        x = super().encode(pixels, layout)
        if not layout:
            return torch.cat((x[0], self.image_newline[None]))[None]
        down, right, above, left = layout
        side = self.vision_tower.patches
        tiles = x[1:].view(down, right, side, side, -1).permute(4, 0, 2, 1, 3).reshape(-1, down * side, right * side)
        tiles = tiles[:, above : down * side - above, left : right * side - left]
        rows, columns = self._grid(len(pixels), layout)
        if tiles.shape[1:] != (rows, columns):
            tiles = functional.interpolate(tiles[None], [rows, columns], mode="bilinear")[0]
        ends = self.image_newline[:, None, None].expand(-1, rows, 1)
        return torch.cat((x[0], torch.cat((tiles, ends), -1).flatten(1).T))[None]

    def _grid(self, tiles: int, layout: Sequence[int]) -> tuple[int, int]:
        """Rows and columns of tokens of the tiles."""
        down, right, above, left = layout
        side = self.vision_tower.patches
        if not 1 < tiles <= _MOST_TILES or down * right != tiles - 1:
            raise ValueError(f"{tiles} tiles in {down} rows and {right} columns, and one of the whole")
        rows, columns = down * side - 2 * above, right * side - 2 * left
        if rows < 0 or columns < 0:
            raise ValueError(f"more than all tokens were filled: {above} rows, {left} columns")
        ratio = math.sqrt(rows * columns / (self._most * side**2)) if self._most else 0.0
        return (int(rows // ratio), int(columns // ratio)) if ratio > _MORE else (rows, columns)


_PARTS = {**TOWERS, "image_newline": "image_newline", "model.image_newline": "image_newline"}
LLAVA_NEXT = VisionFamily(
    "llava_next",
    ("LlavaNextForConditionalGeneration", "LlavaOnevisionForConditionalGeneration"),
    LlavaNextVision,
    _PARTS,
)
