"""Mistral 3 and Pixtral: a picture of about its own size, a token for each block, and one at the end of each row."""

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

_BREAK, _END = "[IMG_BREAK]", "[IMG_END]"


class PixtralPictures(PictureFamily):
    """Implements :class:`PictureFamily`.

    Args:
        settings: The model's.
    """

    def __init__(self, settings: PictureSettings) -> None:
        self.marker = self.token = settings.text("image_token_index", "image_token_id")
        self._side = int(settings.vision.get("patch_size", 16)) * int(settings.config.get("spatial_merge_size", 2))
        self._longest = settings.size("longest_edge", 1540)
        self._resample = settings.resample

    def prepare(self, image: Image.Image, detail: str) -> Prepared:
        width, height = image.size
        shrink = max(width, height) / (max(self._side, self._longest // 2) if detail == "low" else self._longest)
        if shrink > 1:
            width, height = (max(1, math.floor(each / shrink)) for each in (width, height))
        width, height = (-(-each // self._side) * self._side for each in (width, height))
        return tiles_of([image.resize((width, height), self._resample)])

    def expand(self, shape: tuple[int, ...], layout: tuple[int, ...]) -> str:
        _, height, width = shape
        row = self.token * (width // self._side)
        return _BREAK.join([row] * (height // self._side)) + _END


PIXTRAL = PictureFamilyEntry("pixtral", ("Mistral3ForConditionalGeneration",), PixtralPictures)
