"""Other weights for a model, as a step of training leaves them."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def other_weights(path: Path, seed: int) -> dict[str, Tensor]:
    """A checkpoint's tensors under their stored names, with noise that changes what it says; without whole numbers."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=generator) * 0.3 * tensor.float().std(correction=0)
                found[name] = (tensor.float() + noise).to(tensor.dtype)
    return found


def other_checkpoint(path: Path, folder: Path, seed: int) -> Path:
    """Writes a checkpoint with :func:`other_weights` into a new folder; returns it."""
    shutil.copytree(path, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json"))
    save_file(other_weights(path, seed), folder / "model.safetensors", {"format": "pt"})
    return folder
