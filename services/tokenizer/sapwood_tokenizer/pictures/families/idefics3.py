"""Idefics 3 and SmolVLM: a picture in rows of square tiles, each named by row and column, and the whole picture behind."""

from __future__ import annotations

import math

from PIL import Image

from sapwood_tokenizer.pictures.families.family import (
    PictureFamily,
    PictureFamilyEntry,
    PictureSettings,
    Prepared,
    tiles_of,
)

_FAKE, _WHOLE = "<fake_token_around_image>", "<global-img>"
_LONGEST = 4096


class IdeficsPictures(PictureFamily):
    """Implements :class:`PictureFamily`.

    Args:
        settings: The model's.
    """

    def __init__(self, settings: PictureSettings) -> None:
        self.marker = self.token = settings.text("image_token_id")
        self._side = int(settings.vision.get("image_size", 224))
        patches = self._side // int(settings.vision.get("patch_size", 32))
        self._tokens = (patches // int(settings.config.get("scale_factor", 2))) ** 2
        given = settings.processor
        tile = given.get("max_image_size")
        if isinstance(tile, dict) and int(tile.get("longest_edge", self._side)) != self._side:
            raise ValueError(f"max_image_size {tile} is not that of the tower, {self._side}")
        self._longest = min(_LONGEST, settings.size("longest_edge", 4 * self._side))
        self._splits = bool(given.get("do_image_splitting", True))
        self._resample = Image.Resampling(int(given.get("resample", Image.Resampling.LANCZOS)))

    def prepare(self, image: Image.Image, detail: str) -> Prepared:
        side, square = self._side, (self._side, self._side)
        image = image.resize(self._scaled(*image.size), self._resample)
        if not self._splits or detail == "low":
            return tiles_of([image.resize(square, self._resample)], (0, 0))
        image = image.resize(self._whole_tiles(*image.size), self._resample)
        columns, rows = image.size[0] // side, image.size[1] // side
        if columns == rows == 1:
            return tiles_of([image], (0, 0))
        tiles = [
            image.crop((column * side, row * side, (column + 1) * side, (row + 1) * side))
            for row in range(rows)
            for column in range(columns)
        ]
        return tiles_of([*tiles, image.resize(square, self._resample)], (rows, columns))

    def _scaled(self, width: int, height: int) -> tuple[int, int]:
        """The size whose longer side is the longest, the other side even."""
        longer, ratio = self._longest, width / height
        if width >= height:
            other = int(longer / ratio)
            return longer, max(1, other + other % 2)
        other = int(longer * ratio)
        return max(1, other + other % 2), longer

    def _whole_tiles(self, width: int, height: int) -> tuple[int, int]:
        side, ratio = self._side, width / height
        if width >= height:
            width = math.ceil(width / side) * side
            return width, math.ceil(int(width / ratio) / side) * side
        height = math.ceil(height / side) * side
        return math.ceil(int(height * ratio) / side) * side, height

    def expand(self, shape: tuple[int, ...], layout: tuple[int, ...]) -> str:
        rows, columns = layout
        shown = self.token * self._tokens
        text = ""
        for row in range(1, rows + 1):
            text += "".join(f"{_FAKE}<row_{row}_col_{column}>{shown}" for column in range(1, columns + 1)) + "\n"
        between = "\n" if rows else ""
        return f"{text}{between}{_FAKE}{_WHOLE}{shown}{_FAKE}"


IDEFICS3 = PictureFamilyEntry(
    "idefics3", ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"), IdeficsPictures
)
