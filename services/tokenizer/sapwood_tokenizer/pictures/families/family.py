"""What is known of a family of models that take pictures, and of those that take videos.

The process that decodes pictures imports it, so it imports little.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from PIL import Image

SEVERAL = "several"
"""A ``detail`` that no client can send."""


class Prepared(NamedTuple):
    """A picture or a video as a model takes it.

    Attributes:
        shape: Tiles, or frames, height and width.
        layout: Further numbers that the family needs.
        pixels: uint8 [tiles, height, width, 3].
        video: Whether it is a video.
    """

    shape: tuple[int, int, int]
    layout: tuple[int, ...]
    pixels: bytes
    video: bool = False


class VideoFamily(ABC):
    """Prepares videos for one model.

    Attributes:
        marker: What chat templates write in a video's place.
        token: The text of the tokens that stand for parts of a video.
        resample: How frames are resized.
    """

    marker: str
    token: str
    resample: Image.Resampling

    @abstractmethod
    def sample(self, total: int, fps: float, most: int) -> Sequence[int]:
        """Which frames of a video are shown, rising; at least one.

        Args:
            total: Frames that it has.
            fps: Frames a second.
            most: More are not taken.
        """

    @abstractmethod
    def frame_size(self, frames: int, width: int, height: int, most_pixels: int) -> tuple[int, int]:
        """Width and height that frames are brought to.

        Args:
            frames: How many are shown.
            width, height: Theirs in the file.
            most_pixels: Of all of them; the model's own least size is never gone below.

        Raises:
            ValueError: The model takes no such video; says why.
        """

    @abstractmethod
    def expand(self, shape: tuple[int, ...], layout: tuple[int, ...]) -> str:
        """What comes in the place of the marker of a prepared video, whose layout is that of a
        :class:`~sapwood_common.contract.pictures.Clip`."""

    def count(self, shape: tuple[int, ...], layout: tuple[int, ...]) -> int:
        """How many tokens stand for parts of a prepared video."""
        return self.expand(shape, layout).count(self.token)


class PictureFamily(ABC):
    """Prepares pictures for one model.

    Attributes:
        marker: What chat templates write in a picture's place.
        token: The text of the tokens that stand for parts of a picture.
        video: What prepares videos; None: the model takes none.
        of_several: Whether pictures are prepared otherwise if there are several in a request: ``detail`` is then ``SEVERAL``.
    """

    marker: str
    token: str
    video: VideoFamily | None = None
    of_several = False

    @abstractmethod
    def prepare(self, image: Image.Image, detail: str) -> Prepared:
        """A picture for the model.

        Args:
            image: RGB.
            detail: ``low``, ``high``, ``auto`` or empty, as OpenAI has it.

        Raises:
            ValueError: The model takes no such picture; says why.
        """

    @abstractmethod
    def expand(self, shape: tuple[int, ...], layout: tuple[int, ...]) -> str:
        """What comes in the place of the marker of a prepared picture."""

    def count(self, shape: tuple[int, ...], layout: tuple[int, ...]) -> int:
        """How many tokens stand for parts of a prepared picture."""
        return self.expand(shape, layout).count(self.token)


class PictureSettings(NamedTuple):
    """A model's settings.

    Attributes:
        config: ``config.json``.
        processor: The settings of its image processor; empty: there is no such file.
        texts: The texts of the tokens whose ids ``config.json`` gives, by the setting's name.
        video_processor: The settings of its video processor; empty: there is no such file.
    """

    config: Mapping[str, Any]
    processor: Mapping[str, Any]
    texts: Mapping[str, str]
    video_processor: Mapping[str, Any] = MappingProxyType({})

    @property
    def vision(self) -> Mapping[str, Any]:
        """``vision_config``. Raises ValueError if there is none."""
        found = self.config.get("vision_config")
        if not isinstance(found, dict):
            raise ValueError("vision_config is no object")
        return found

    def text(self, *names: str) -> str:
        """The text of a token whose id one of these settings gives. Raises ValueError if none does."""
        for name in names:
            if name in self.texts:
                return self.texts[name]
        raise ValueError(f"{names[0]} names no token")

    def size(self, name: str, default: int) -> int:
        """A number of the processor's ``size``."""
        size = self.processor.get("size")
        if isinstance(size, dict):
            return int(size.get(name) or default)
        return int(size) if isinstance(size, int) else default

    @property
    def resample(self) -> Image.Resampling:
        """How pictures are resized."""
        return Image.Resampling(int(self.processor.get("resample", Image.Resampling.BICUBIC)))


@dataclass(frozen=True, slots=True)
class PictureFamilyEntry:
    """A family in the registry.

    Attributes:
        name: Its name.
        architectures: The models, by their names in ``config.json``.
        make: Makes what prepares pictures. Raises ValueError, KeyError or TypeError if the settings do not fit.
    """

    name: str
    architectures: tuple[str, ...]
    make: Callable[[PictureSettings], PictureFamily]


def tiles_of(images: list[Image.Image], layout: tuple[int, ...] = ()) -> Prepared:
    """Tiles of one size as a prepared picture."""
    width, height = images[0].size
    return Prepared((len(images), height, width), layout, b"".join(image.tobytes() for image in images))
