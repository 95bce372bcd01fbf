"""Qwen's VL models: a picture of about its own size, in blocks of patches, one token each."""

from __future__ import annotations

from PIL import Image

from sapwood_tokenizer.pictures.families.family import (
    PictureFamily,
    PictureFamilyEntry,
    PictureSettings,
    Prepared,
    tiles_of,
)
from sapwood_tokenizer.pictures.families.qwen_video import Qwen2Videos, Qwen3Videos, whole_blocks


class QwenPictures(PictureFamily):
    """Implements :class:`PictureFamily`.

    Args:
        settings: The model's.
    """

    def __init__(self, settings: PictureSettings) -> None:
        self.marker = self.token = settings.text("image_token_id")
        given = settings.processor
        patch = int(given.get("patch_size") or settings.vision.get("patch_size", 14))
        self._side = patch * int(given.get("merge_size") or settings.vision.get("spatial_merge_size", 2))
        self._least = int(given.get("min_pixels") or settings.size("shortest_edge", 56 * 56))
        self._most = int(given.get("max_pixels") or settings.size("longest_edge", 28 * 28 * 1280))
        self._resample = settings.resample
        if "video_token_id" in settings.texts:
            later = settings.config.get("architectures", [""])[0].startswith("Qwen3")
            self.video = (Qwen3Videos if later else Qwen2Videos)(settings)

    def prepare(self, image: Image.Image, detail: str) -> Prepared:
        width, height = image.size
        most = max(self._least, self._most // 4) if detail == "low" else self._most
        height, width = whole_blocks(height, width, self._side, self._least, most)
        return tiles_of([image.resize((width, height), self._resample)])

    def expand(self, shape: tuple[int, ...], layout: tuple[int, ...]) -> str:
        _, height, width = shape
        return self.token * (height // self._side * (width // self._side))


QWEN_VL = PictureFamilyEntry(
    "qwen_vl",
    (
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
    ),
    QwenPictures,
)
