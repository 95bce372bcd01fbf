"""Llama 4: a picture on the smallest canvas of tiles that it needs not be shrunk for, and the whole picture as one more tile."""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

from sapwood_tokenizer.pictures.families.family import (
    PictureFamily,
    PictureFamilyEntry,
    PictureSettings,
    Prepared,
    tiles_of,
)

_BEGIN, _END, _WHOLE = "<|image_start|>", "<|image_end|>", "<|image|>"
_RIGHT, _DOWN = "<|tile_x_separator|>", "<|tile_y_separator|>"
_MOST_TILES = 64


class Llama4Pictures(PictureFamily):
    """Implements :class:`PictureFamily`.

    Args:
        settings: The model's.
    """

    marker = _WHOLE

    def __init__(self, settings: PictureSettings) -> None:
        self.token = settings.text("image_token_index", "image_token_id")
        vision, given = settings.vision, settings.processor
        self._side = int(vision.get("image_size", 448))
        if settings.size("height", self._side) != self._side:
            raise ValueError(f"the processor makes tiles of {settings.size('height', 0)} pixels, not {self._side}")
        patches = self._side // int(vision.get("patch_size", 14))
        self._tokens = int(patches * float(vision.get("pixel_shuffle_ratio", 0.5))) ** 2
        most = min(_MOST_TILES, int(given.get("max_patches") or 16))
        if given.get("resize_to_max_canvas"):
            raise ValueError("resize_to_max_canvas is not supported")
        by_ratio: dict[float, list[tuple[int, int]]] = {}
        for count in range(most, 0, -1):
            for rows in range(1, count + 1):
                if count % rows == 0:
                    by_ratio.setdefault(rows * rows / count, []).append((rows, count // rows))
        self._canvases = [each for some in by_ratio.values() for each in some]
        self._resample = Image.Resampling(int(given.get("resample", Image.Resampling.BILINEAR)))

    def prepare(self, image: Image.Image, detail: str) -> Prepared:
        side = self._side
        width, height = image.size
        rows, columns = (1, 1) if detail == "low" else self._canvas(width, height)
        # It is made larger up to the side of a tile, and no further.
        high, wide = min(max(height, side), rows * side), min(max(width, side), columns * side)
        if wide / width < high / height:
            size = wide, min(math.floor(height * (wide / width)), high)
        else:
            size = min(math.floor(width * (high / height)), wide), high
        canvas = Image.new("RGB", (columns * side, rows * side))
        canvas.paste(image.resize((max(1, size[0]), max(1, size[1])), self._resample), (0, 0))
        tiles = [
            canvas.crop((column * side, row * side, (column + 1) * side, (row + 1) * side))
            for row in range(rows)
            for column in range(columns)
        ]
        if len(tiles) > 1:
            tiles.append(image.resize((side, side), self._resample))
        return tiles_of(tiles, (rows, columns))

    def _canvas(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of tiles. In float32, as transformers compares scales."""
        sizes = np.array(self._canvases, np.float32) * np.float32(self._side)
        scales = np.minimum(sizes[:, 0] / np.float32(height), sizes[:, 1] / np.float32(width))
        larger = scales[scales >= 1]
        scale = larger.min() if len(larger) else scales.max()
        fitting = [each for each, found in zip(self._canvases, scales, strict=True) if found == scale]
        return min(fitting, key=lambda canvas: canvas[0] * canvas[1])

    def expand(self, shape: tuple[int, ...], layout: tuple[int, ...]) -> str:
        rows, columns = layout
        tile, text = self.token * self._tokens, _BEGIN
        if rows * columns > 1:
            text += (_RIGHT.join([tile] * columns) + _DOWN) * rows
        return f"{text}{_WHOLE}{tile}{_END}"


LLAMA4 = PictureFamilyEntry("llama4", ("Llama4ForConditionalGeneration",), Llama4Pictures)
