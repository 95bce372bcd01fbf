"""LLaVA-NeXT and LLaVA-OneVision: the whole picture as a square, and tiles of it in the resolution that fits it best."""

from __future__ import annotations

import math

from PIL import Image

from sapwood_tokenizer.pictures.families.family import (
    SEVERAL,
    PictureFamily,
    PictureFamilyEntry,
    PictureSettings,
    Prepared,
    tiles_of,
)

_MOST_TILES = 63


class LlavaNextPictures(PictureFamily):
    """Implements :class:`PictureFamily`.

    Args:
        settings: The model's.
    """

    def __init__(self, settings: PictureSettings) -> None:
        config, given = settings.config, settings.processor
        self.marker = self.token = settings.text("image_token_index", "image_token_id")
        self._one_vision = self.of_several = config.get("model_type") == "llava_onevision"
        clip = settings.vision.get("model_type") == "clip_vision_model"
        self._side = side = int(settings.vision.get("image_size", 224))
        self._patches = side // int(settings.vision.get("patch_size", 32 if clip else 16))
        made = settings.size("shortest_edge", 0) or settings.size("height", side)
        crop = given.get("crop_size")
        if made != side or (isinstance(crop, dict) and crop.get("height", side) != side):
            raise ValueError(f"the processor makes tiles of {made} pixels, the tower takes {side}")
        pinpoints = given.get("image_grid_pinpoints") or config.get("image_grid_pinpoints") or []
        self._grids = [(int(height) // side, int(width) // side) for height, width in pinpoints]
        if not self._grids or any(not 0 < rows * columns <= _MOST_TILES for rows, columns in self._grids):
            raise ValueError("image_grid_pinpoints has no resolution, or one without tiles or of too many")
        self._most = int(str(config.get("vision_aspect_ratio", "anyres_max_9")).removeprefix("anyres_max_"))
        self._mean = tuple(int(each * 255) for each in given.get("image_mean") or (0.5, 0.5, 0.5))
        self._resample = settings.resample

    def prepare(self, image: Image.Image, detail: str) -> Prepared:
        side, square = self._side, (self._side, self._side)
        if detail == SEVERAL:
            longer = max(image.size)
            filled = Image.new("RGB", (longer, longer), self._mean)
            filled.paste(image, ((longer - image.size[0]) // 2, (longer - image.size[1]) // 2))
            return tiles_of([filled.resize(square, self._resample)])
        rows, columns = self._grid(*image.size, few=detail == "low")
        high, wide = rows * side, columns * side
        width, height = image.size
        if wide / width < high / height:
            size = wide, min(math.ceil(height * (wide / width)), high)
        else:
            size = min(math.ceil(width * (high / height)), wide), high
        filled = Image.new("RGB", (wide, high))
        filled.paste(image.resize(size, self._resample), ((wide - size[0]) // 2, (high - size[1]) // 2))
        tiles = [
            filled.crop((column * side, row * side, (column + 1) * side, (row + 1) * side))
            for row in range(rows)
            for column in range(columns)
        ]
        whole = image.resize(square, self._resample)
        return tiles_of([whole, *tiles], (rows, columns, *self._filled(rows, columns, width, height)))

    def _grid(self, width: int, height: int, *, few: bool) -> tuple[int, int]:
        """Rows and columns of the tiles that show most of a picture's pixels, and of these the fewest."""
        grids = [min(self._grids, key=lambda grid: grid[0] * grid[1])] if few else self._grids
        found, best = grids[0], (-1, 0)
        for rows, columns in grids:
            high, wide = rows * self._side, columns * self._side
            scale = min(wide / width, high / height)
            shown = min(int(width * scale) * int(height * scale), width * height)
            if (shown, shown - high * wide) > best:
                found, best = (rows, columns), (shown, shown - high * wide)
        return found

    def _filled(self, rows: int, columns: int, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of tokens that show nothing, on either side."""
        down, right = rows * self._patches, columns * self._patches
        if width / height > right / down:
            return (down - int(round(height * (right / width), 7))) // 2, 0
        return 0, (right - int(round(width * (down / height), 7))) // 2

    def expand(self, shape: tuple[int, ...], layout: tuple[int, ...]) -> str:
        count = self._patches**2
        if not layout:
            return self.token * (count + 1)
        down, right = layout[0] * self._patches - 2 * layout[2], layout[1] * self._patches - 2 * layout[3]
        if self._one_vision:
            ratio = math.sqrt(down * right / (self._most * count))
            if ratio > 1.1:
                down, right = int(down // ratio), int(right // ratio)
        return self.token * (count + down * (right + 1))


LLAVA_NEXT = PictureFamilyEntry(
    "llava_next",
    ("LlavaNextForConditionalGeneration", "LlavaOnevisionForConditionalGeneration"),
    LlavaNextPictures,
)
