"""What every vision part is, and what several share: pixels as numbers, and attention among patches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from sapwood_worker.records.pictures import Picture

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class VisionFiles:
    """The settings of a model with a vision part.

    Attributes:
        config: ``config.json``.
        processor: The settings of its image processor; empty: there is no such file.
    """

    config: Mapping[str, Any]
    processor: Mapping[str, Any]

    @property
    def vision(self) -> Mapping[str, Any]:
        """``vision_config``. Raises ValueError if there is none."""
        found = self.config.get("vision_config")
        if not isinstance(found, dict):
            raise ValueError("vision_config is no object")
        return found

    @property
    def text(self) -> Mapping[str, Any]:
        """``text_config``, or all settings where those of the language part are among them."""
        found = self.config.get("text_config")
        return found if isinstance(found, dict) else self.config

    def token(self, *names: str) -> int:
        """The id of a token that one of these settings gives. Raises ValueError if none does."""
        found = next((self.config[name] for name in names if self.config.get(name) is not None), None)
        if not isinstance(found, int):
            raise ValueError(f"{names[0]} is {found!r:.40}; it can be the id of a token")
        return found


class Vision(nn.Module, ABC):
    """A tower and what fits its outputs to the language model. Its parameters have the names of the checkpoint's tensors.

    Attributes:
        token: The id of the tokens that stand for pictures.
        video_token: The id of those that stand for videos; None: it takes none.
        whole: Whether the tokens of a picture see all of it in the language model.
        levels: Tensors that it makes of a picture: its tokens' embeddings, and what is added to the outputs of the first layers
            of the language model, one for each (DeepStack).
    """

    token: int
    video_token: int | None = None
    whole = False
    levels = 1

    @property
    def tokens(self) -> tuple[int, ...]:
        """The ids of all tokens that stand for parts of what is seen."""
        return (self.token,) if self.video_token is None else (self.token, self.video_token)

    def token_of(self, layout: Sequence[int]) -> int:
        """The id of the tokens that stand for parts of a picture, or of a video, with this layout."""
        return self.token

    @abstractmethod
    def count(self, shape: Sequence[int], layout: Sequence[int]) -> int:
        """How many tokens stand for a picture.

        Args:
            shape: Tiles, height and width.
            layout: Further numbers that the family needs.

        Raises:
            ValueError: The model takes no such picture; says why.
        """

    @abstractmethod
    def encode(self, pixels: Tensor, layout: Sequence[int]) -> Tensor:
        """A picture for the language model.

        Args:
            pixels: uint8 [tiles, height, width, 3], on the parameters' device.
            layout: Further numbers that the family needs.

        Returns:
            [levels, tokens, hidden size of the language model].
        """

    def positions(self, length: int, pictures: Sequence[Picture], places: Sequence[IntArray]) -> IntArray | None:
        """The positions of a prompt's tokens on three axes; None: each token has its place as its only position.

        Args:
            length: Tokens up to the end of the last picture.
            pictures: The pictures.
            places: For each picture, the places of the tokens that stand for its parts, in order.

        Returns:
            int64 [3, length + 1]; the last column is that of the token that follows.
        """
        return None


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """A family of vision parts.

    Attributes:
        name: Its name.
        architectures: The models that have one, by their names in ``config.json``.
        build: Makes the vision part, without its weights. Raises ValueError, KeyError or TypeError if it cannot.
        prefixes: How names in checkpoints begin, and how the parameters' do instead.
    """

    name: str
    architectures: tuple[str, ...]
    build: Callable[[VisionFiles], Vision]
    prefixes: Mapping[str, str] = field(default_factory=dict)


class Normaliser:
    """Turns pixels into what towers take.

    Args:
        processor: The settings of the image processor.
        mean, std: Each channel's, unless the settings give them.
    """

    def __init__(self, processor: Mapping[str, Any], mean: Sequence[float], std: Sequence[float]) -> None:
        self._mean = [float(each) for each in processor.get("image_mean") or mean]
        self._std = [float(each) for each in processor.get("image_std") or std]
        self._factor = float(processor.get("rescale_factor") or 1 / 255)
        if len(self._mean) != 3 or len(self._std) != 3 or not all(self._std):
            raise ValueError("image_mean and image_std are three numbers each, and no part of image_std is 0")

    def __call__(self, pixels: Tensor) -> Tensor:
        """uint8 [tiles, height, width, 3] -> float32 [tiles, 3, height, width]."""
        mean, std = (torch.tensor(each, device=pixels.device) for each in (self._mean, self._std))
        return ((pixels.float() * self._factor - mean) / std).permute(0, 3, 1, 2)


CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)
"""The mean, and the deviation, that SigLIP's towers take."""

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": functional.silu,
}


def activation(name: Any) -> Callable[[Tensor], Tensor]:
    """An activation by its name in a configuration. Raises ValueError if it is not supported."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r:.40} of the vision part is not supported")
    return ACTIVATIONS[name]


def attend(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], scale: float | None = None) -> Tensor:
    """Attention of each token to all tokens of its own run.

    Args:
        query, key, value: [T, heads, size of a head].
        lengths: Tokens of each run, in order. Runs next to each other that are equally long are computed together.
        scale: Factor of products; None: one over the root of a head's size.

    Returns:
        [T, heads * size of a head].
    """
    outputs, start = [], 0
    for length, group in groupby(lengths):
        count = len(list(group))
        part = slice(start, start + count * length)
        start = part.stop
        q, k, v = (each[part].view(count, length, *each.shape[1:]).transpose(1, 2) for each in (query, key, value))
        outputs.append(functional.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).flatten(1)


def turn(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding: numbers that lie half a head apart are turned together.

    Args:
        heads: [T, heads, size of a head].
        cos, sin: float32 [T, size of a head].
    """
    wide = heads.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]).to(heads.dtype)
