"""Finds out whether a model has a vision part that is served, and loads it."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError

from sapwood_common.errors import ConfigError
from sapwood_common.models.image_processor import read_image_processor
from sapwood_common.models.json_file import read_json_object
from sapwood_worker.model.checkpoint.safetensors_source import checkpoint_files, checkpoint_shards, open_weights
from sapwood_worker.model.vision.registry import vision_families
from sapwood_worker.model.vision.tower import Vision, VisionFamily, VisionFiles

_DUMMY_STD = 0.02


class UnservedVisionError(ConfigError):
    """The vision part is of a kind that is not served, or the files hold none: text alone can be served."""


_NUMBERS = (torch.float32, torch.bfloat16, torch.float16)


def vision_family(directory: Path) -> VisionFamily | None:
    """The family of a model's vision part; None: the model has none that is served.

    Args:
        directory: The model's, or a file, which has none.

    Raises:
        ConfigError: ``config.json`` cannot be read.
    """
    if not directory.is_dir():
        return None
    names = read_json_object(directory / "config.json").get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    return next((family for family in vision_families() if name in family.architectures), None)


def load_vision(
    directory: Path, family: VisionFamily, dtype: torch.dtype, device: torch.device, seed: int | None = None
) -> Vision:
    """The vision part of a model, whole, with its weights.

    Args:
        directory: A Hugging Face directory.
        family: What :func:`vision_family` gave.
        dtype: The dtype of weights and activations.
        device: Where it goes.
        seed: Makes weights up with this seed; None: they are read.

    Raises:
        UnservedVisionError: It is of a kind that is not served, or the files hold none of its tensors; names the file and what.
        ConfigError: It cannot be read.
    """
    path = directory / "config.json"
    files = VisionFiles(read_json_object(path), read_image_processor(directory))
    try:
        with torch.device("meta"):
            vision = family.build(files)
    except KeyError as error:
        raise UnservedVisionError(f"{path}: {error} is missing, of the vision part") from error
    except (ValueError, TypeError, ArithmeticError, AttributeError) as error:
        raise UnservedVisionError(f"{path}: of the vision part: {error}") from error
    vision = vision.to(dtype).to_empty(device=device).requires_grad_(False).eval()
    with torch.inference_mode():
        if seed is None:
            _read(directory, family, vision)
        else:
            _make_up(vision, seed)
    return vision


def _make_up(vision: Vision, seed: int) -> None:
    generator = torch.Generator(next(vision.parameters()).device).manual_seed(seed)
    for name, weight in sorted(vision.named_parameters()):
        if weight.dim() == 1 and name.endswith("weight"):
            weight.fill_(1.0)
        else:
            weight.normal_(0.0, _DUMMY_STD, generator=generator)


def _read(directory: Path, family: VisionFamily, vision: Vision) -> None:
    wanted = dict(vision.named_parameters())
    missing, shards = set(wanted), checkpoint_shards(directory)
    for path in checkpoint_files(directory):
        file = open_weights(path)
        for stored in file.keys():  # noqa: SIM118  (not a mapping)
            if shards.get(stored, path) != path:
                continue
            name = _name(stored, family)
            if name not in wanted:
                continue
            missing.discard(name)
            try:
                tensor = file.get_tensor(stored)
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"{path}: tensor {stored} cannot be read: {error}") from error
            if tensor.shape != wanted[name].shape or tensor.dtype not in _NUMBERS:
                raise ConfigError(
                    f"{path}: tensor {stored} has shape {list(tensor.shape)} and type {tensor.dtype}; "
                    f"the vision part takes {list(wanted[name].shape)}, not quantised"
                )
            wanted[name].copy_(tensor)
    if missing == set(wanted):
        raise UnservedVisionError(f"{directory}: holds no tensor of the vision part")
    if missing:
        raise ConfigError(
            f"{directory}: {min(missing)} and {len(missing) - 1} more tensors of the vision part are missing"
        )


def _name(stored: str, family: VisionFamily) -> str:
    prefix = max((each for each in family.prefixes if stored.startswith(each)), key=len, default=None)
    return "" if prefix is None else family.prefixes[prefix] + stored.removeprefix(prefix)
