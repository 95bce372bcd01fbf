"""Gemma 3: a picture as one square, whatever its ratio of sides; pan and scan is left out, as it is by default."""

from __future__ import annotations

from PIL import Image

from sapwood_tokenizer.pictures.families.family import (
    PictureFamily,
    PictureFamilyEntry,
    PictureSettings,
    Prepared,
    tiles_of,
)


class GemmaPictures(PictureFamily):
    """Implements :class:`PictureFamily`.

    Args:
        settings: The model's.
    """

    def __init__(self, settings: PictureSettings) -> None:
        self.token = settings.text("image_token_index", "image_token_id")
        self.marker = settings.text("boi_token_index", "boi_token_id")
        self._end = settings.text("eoi_token_index", "eoi_token_id")
        self._side = int(settings.vision.get("image_size", 896))
        self._tokens = int(settings.config.get("mm_tokens_per_image", 256))
        self._resample = Image.Resampling(int(settings.processor.get("resample", Image.Resampling.BILINEAR)))
        if settings.processor.get("do_pan_and_scan"):
            raise ValueError("do_pan_and_scan is not supported")

    def prepare(self, image: Image.Image, detail: str) -> Prepared:
        return tiles_of([image.resize((self._side, self._side), self._resample)])

    def expand(self, shape: tuple[int, ...], layout: tuple[int, ...]) -> str:
        return f"\n\n{self.marker}{self.token * self._tokens}{self._end}\n\n"


GEMMA3 = PictureFamilyEntry("gemma3", ("Gemma3ForConditionalGeneration",), GemmaPictures)
