"""Prompts with pictures for tiny models: what the tokenizer service prepares, without the service."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image
from tokenizers import Tokenizer

from sapwood_common.contract.pictures import picture_digest
from sapwood_testing.models.vision_models import TinyVision
from sapwood_tokenizer.pictures.families.family import SEVERAL, PictureSettings
from sapwood_tokenizer.pictures.families.registry import picture_family
from sapwood_tokenizer.pictures.preparer import texts_of
from sapwood_tokenizer.pictures.videos import VideoLimits, prepare_video
from sapwood_worker.records.pictures import Picture

SIZES = [(150, 210), (64, 300), (200, 90)]
VIDEOS = VideoLimits(most_pixels=1_000_000, frames=768, seconds=600.0, shown_pixels=16_000_000)
"""What is taken of videos in tests."""


class Video(NamedTuple):
    """A video as tests make it.

    Attributes:
        frames: RGB, all of one size.
        fps: Frames a second.
    """

    frames: Sequence[Image.Image]
    fps: float

    def file(self) -> bytes:
        """An animated PNG, which keeps each pixel."""
        made = io.BytesIO()
        first, *rest = self.frames
        first.save(made, "PNG", save_all=True, append_images=rest, duration=1000 / self.fps)
        return made.getvalue()


class Prompts:
    """Makes prompts of a tiny model: the tokenizer service's preparation, without the service."""

    def __init__(self, tiny: TinyVision) -> None:
        self.tiny = tiny
        self.tokenizer = Tokenizer.from_file(str(tiny.path / "tokenizer.json"))
        entry = picture_family(tiny.oracle.config.to_dict() | {"architectures": [type(tiny.oracle).__name__]})
        assert entry is not None
        config = tiny.oracle.config.to_dict()
        settings = PictureSettings(config, tiny.settings, texts_of(config, self.tokenizer), tiny.made.video)
        self.family = entry.make(settings)

    def make(self, *parts: str | Image.Image | Video) -> tuple[list[int], list[Picture]]:
        """The tokens of texts, pictures and videos in a row, and what is seen."""
        tokens: list[int] = []
        pictures: list[Picture] = []
        several = sum(isinstance(part, Image.Image) for part in parts) > 1
        for part in parts:
            if isinstance(part, str):
                tokens += self.tokenizer.encode(part).ids
                continue
            if isinstance(part, Video):
                assert self.family.video is not None
                found = prepare_video(part.file(), self.family.video, VIDEOS)
                text, pad = self.family.video.expand(found.shape, found.layout), self.tiny.image + 1
            else:
                found = self.family.prepare(part, SEVERAL if several and self.family.of_several else "")
                text, pad = self.family.expand(found.shape, found.layout), self.tiny.image
            more = self.tokenizer.encode(text).ids
            pads = [place for place, token in enumerate(more) if token == pad]
            digest = picture_digest("", found.shape, found.layout, found.pixels)
            pictures.append(
                Picture(len(tokens) + pads[0], pads[-1] - pads[0] + 1, digest, found.shape, found.layout, found.pixels)
            )
            tokens += more
        return tokens, pictures


def picture(seed: int, size: tuple[int, int] | None = None) -> Image.Image:
    """A random picture."""
    width, height = size or SIZES[seed % len(SIZES)]
    numbers = np.random.default_rng(seed).integers(0, 256, (height // 10 + 1, width // 10 + 1, 3), dtype=np.uint8)
    return Image.fromarray(numbers).resize((width, height), Image.Resampling.NEAREST)


def video(seed: int, count: int, fps: float = 2.0, size: tuple[int, int] = (90, 60)) -> Video:
    """A random video."""
    return Video([picture(1000 * seed + index, size) for index in range(count)], fps)
