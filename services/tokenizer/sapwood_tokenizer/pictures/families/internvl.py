"""InternVL: tiles of one size in the grid whose ratio of sides is nearest to the picture's, and the whole picture as one more."""

from __future__ import annotations

from PIL import Image

from sapwood_tokenizer.pictures.families.family import (
    PictureFamily,
    PictureFamilyEntry,
    PictureSettings,
    Prepared,
    tiles_of,
)

_BEGIN, _END = "<img>", "</img>"
_MOST_TILES = 63


class InternPictures(PictureFamily):
    """Implements :class:`PictureFamily`.

    Args:
        settings: The model's.
    """

    def __init__(self, settings: PictureSettings) -> None:
        self.marker = self.token = settings.text("image_token_id")
        given = settings.vision.get("image_size") or 448
        self._side = int(given[0] if isinstance(given, list) else given)
        patch = settings.vision.get("patch_size") or 14
        patches = self._side // int(patch[0] if isinstance(patch, list) else patch)
        self._tokens = int(patches * float(settings.config.get("downsample_ratio", 0.5))) ** 2
        self._least = int(settings.processor.get("min_patches") or 1)
        self._most = min(_MOST_TILES, int(settings.processor.get("max_patches") or 12))
        self._resample = settings.resample

    def prepare(self, image: Image.Image, detail: str) -> Prepared:
        side = self._side
        columns, rows = (1, 1) if detail == "low" else self._grid(*image.size)
        large = image.resize((side * columns, side * rows), self._resample)
        tiles = [
            large.crop((column * side, row * side, (column + 1) * side, (row + 1) * side))
            for row in range(rows)
            for column in range(columns)
        ]
        if len(tiles) > 1:
            tiles.append(image.resize((side, side), self._resample))
        return tiles_of(tiles)

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Columns and rows; of several grids that fit alike the larger one, unless the picture is far smaller."""
        grids = [
            (columns, rows)
            for columns in range(1, self._most + 1)
            for rows in range(1, self._most + 1)
            if self._least <= columns * rows <= self._most
        ]
        best, least = (1, 1), float("inf")
        for columns, rows in sorted(grids, key=lambda grid: grid[0] * grid[1]):
            differs = abs(width / height - columns / rows)
            if differs < least:
                best, least = (columns, rows), differs
            elif differs == least and width * height > 0.5 * self._side**2 * columns * rows:
                best = columns, rows
        return best

    def expand(self, shape: tuple[int, ...], layout: tuple[int, ...]) -> str:
        return _BEGIN + self.token * (shape[0] * self._tokens) + _END


INTERNVL = PictureFamilyEntry("internvl", ("InternVLForConditionalGeneration",), InternPictures)
