"""transformers' video processors without torchvision, whose builds on PyPI are for GPUs: frames are resized by Pillow, as
transformers' processors of pictures resize them."""

from __future__ import annotations

import importlib
import itertools
import sys
from types import ModuleType
from typing import Any

import numpy as np
import torch
from PIL import Image

_STUBS = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2", "torchvision.transforms.v2.functional")


def video_processor(family: str, settings: dict[str, Any]) -> Any:
    """The video processor of a family.

    Args:
        family: The folder's name in ``transformers.models``.
        settings: Its own.
    """
    base: Any = importlib.import_module("transformers.video_processing_utils")
    return _processor(family, "video_processing", base.BaseVideoProcessor, settings)


def image_processor(family: str, settings: dict[str, Any]) -> Any:
    """The image processor of a family that has one with torchvision alone; arguments as :func:`video_processor`."""
    base: Any = importlib.import_module("transformers.image_processing_backends")
    return _processor(family, "image_processing", base.TorchvisionBackend, settings)


def _processor(family: str, kind: str, base: Any, settings: dict[str, Any]) -> Any:
    name = f"transformers.models.{family}.{kind}_{family}"
    module = _imported(name)

    class ByPillow(base):  # type: ignore[misc]
        def convert_to_rgb(self, video: torch.Tensor) -> torch.Tensor:
            return video

        def process_image(self, image: Image.Image, **_: Any) -> torch.Tensor:
            return torch.from_numpy(np.array(image)).permute(2, 0, 1)

        def resize(self, image: torch.Tensor, size: Any, resample: Any = None, **_: Any) -> torch.Tensor:
            frames = image.flatten(0, -4).permute(0, 2, 3, 1).numpy()
            made = [
                np.asarray(Image.fromarray(each).resize((size.width, size.height), Image.Resampling(int(resample))))
                for each in frames
            ]
            turned = torch.from_numpy(np.stack(made)).permute(0, 3, 1, 2)
            return turned.reshape(*image.shape[:-2], size.height, size.width)

        def normalize(self, images: torch.Tensor, mean: Any, std: Any) -> torch.Tensor:
            middle, spread = (torch.tensor(each, dtype=images.dtype)[:, None, None] for each in (mean, std))
            return (images - middle) / spread

        def rescale_and_normalize(
            self, images: torch.Tensor, _rescale: bool, factor: float, _normalize: bool, mean: Any, std: Any
        ) -> torch.Tensor:
            return self.normalize(images.float() * factor, mean, std)

    own = next(
        each
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, base) and each.__module__ == name
    )
    return type("Processor", (own, ByPillow), {})(**settings)


def _imported(name: str) -> ModuleType:
    """A module that wants torchvision at its head, with what it takes of it."""
    if name not in sys.modules:
        stubs = {each: ModuleType(each) for each in _STUBS if each not in sys.modules}
        for outer, inner in itertools.pairwise(_STUBS):
            if inner in stubs:
                setattr(stubs.get(outer) or sys.modules[outer], inner.rpartition(".")[2], stubs[inner])
        if _STUBS[-1] in stubs:
            stubs[_STUBS[-1]].pad = _pad  # type: ignore[attr-defined]
        sys.modules.update(stubs)
        try:
            importlib.import_module(name)
        finally:
            for each in stubs:
                del sys.modules[each]
    return sys.modules[name]


def _pad(images: torch.Tensor, padding: list[int], fill: list[int]) -> torch.Tensor:
    left, top, right, bottom = padding
    assert not any(fill)
    return torch.nn.functional.pad(images, (left, right, top, bottom))
