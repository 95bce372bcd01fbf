"""LLaVA 1.5: the middle square of a picture as one tile."""

from __future__ import annotations

from PIL import Image

from sapwood_tokenizer.pictures.families.family import (
    PictureFamily,
    PictureFamilyEntry,
    PictureSettings,
    Prepared,
    tiles_of,
)


class LlavaPictures(PictureFamily):
    """Implements :class:`PictureFamily`.

    Args:
        settings: The model's.
    """

    def __init__(self, settings: PictureSettings) -> None:
        self.marker = self.token = settings.text("image_token_index", "image_token_id")
        clip = settings.vision.get("model_type") == "clip_vision_model"
        self._side = int(settings.vision.get("image_size", 224))
        patches = (self._side // int(settings.vision.get("patch_size", 32 if clip else 16))) ** 2
        strategy = settings.config.get("vision_feature_select_strategy", "default")
        self._tokens = patches + int(clip) - int(strategy == "default")
        given = settings.processor
        self._shortest = settings.size("shortest_edge", 0)
        self._crops = bool(given.get("do_center_crop", clip))
        if given.get("do_pad"):
            raise ValueError("do_pad is not supported: pictures that are padded to squares")
        self._resample = settings.resample

    def prepare(self, image: Image.Image, detail: str) -> Prepared:
        width, height = image.size
        side, size = self._side, (self._side, self._side)
        if self._shortest:
            short, long = min(width, height), max(width, height)
            longer = int(self._shortest * long / short)
            size = (self._shortest, longer) if width <= height else (longer, self._shortest)
        resized = image.resize(size, self._resample)
        if resized.size == (side, side):
            return tiles_of([resized])
        if not self._crops or min(resized.size) < side:
            raise ValueError(
                f"the processor makes it {resized.size[0]} x {resized.size[1]} pixels, not {side} x {side}"
            )
        left, top = ((each - side) // 2 for each in resized.size)
        return tiles_of([resized.crop((left, top, left + side, top + side))])

    def expand(self, shape: tuple[int, ...], layout: tuple[int, ...]) -> str:
        return self.token * self._tokens


LLAVA = PictureFamilyEntry("llava", ("LlavaForConditionalGeneration",), LlavaPictures)
