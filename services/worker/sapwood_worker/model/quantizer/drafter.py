"""Makes a draft model from a model, for trials of drafting: its first layers, or the whole model with noise.

A small model that was trained is better than a large one's first layers. Noise is a dial: the more of it, the fewer of its
drafts are right.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sapwood_common.errors import ConfigError
from sapwood_worker.model.checkpoint.hf_config import read_hf_quantization
from sapwood_worker.model.checkpoint.safetensors_source import checkpoint_files, open_weights
from sapwood_worker.model.quantizer.quantize import CheckpointWriter

_LAYER = re.compile(r"\.layers\.(\d+)\.")


def make_drafter(source: Path, target: Path, *, layers: int | None, noise: float, seed: int = 0) -> int:
    """Writes a draft model.

    Args:
        source: A Hugging Face directory.
        target: The new one.
        layers: How many of its layers, the first ones; None: all.
        noise: Normal noise that is added to each matrix, in parts of the matrix's own standard deviation.
        seed: The noise's seed.

    Returns:
        The number of its layers.

    Raises:
        ConfigError: The source cannot be read or is quantised, does not have more layers than the drafter takes, or the target
            exists.
    """
    if not source.is_dir():
        raise ConfigError(f"{source}: draft models are made of Hugging Face directories only")
    if read_hf_quantization(source):
        raise ConfigError(f"{source}: config.json says that it is quantised")
    if target.exists():
        raise ConfigError(f"{target} is there already")
    whole = json.loads((source / "config.json").read_text())
    inner = whole.get("text_config", whole)
    count = int(inner["num_hidden_layers"])
    kept = count if layers is None else layers
    if not 1 <= kept <= count:
        raise ConfigError(f"--layers {kept}: {source} has {count} layers")
    writer, generator = CheckpointWriter(target), torch.Generator().manual_seed(seed)
    try:
        for path in checkpoint_files(source):
            with open_weights(path) as file:
                for name in file.keys():  # noqa: SIM118  (not a mapping)
                    layer = _LAYER.search(name)
                    if layer is None or int(layer[1]) < kept:
                        writer.add(name, _noisy(file.get_tensor(name), noise, generator))
        changed = _cut(inner, count, kept)
        writer.finish(source, changed if inner is whole else {"text_config": inner | changed})
    finally:
        writer.abandon()
    return kept


def _noisy(tensor: Tensor, noise: float, generator: torch.Generator) -> Tensor:
    if not noise or tensor.dim() < 2 or not tensor.is_floating_point():
        return tensor
    wide = tensor.float()
    return (wide + torch.randn(wide.shape, generator=generator) * wide.std() * noise).to(tensor.dtype)


def _cut(config: dict[str, Any], count: int, kept: int) -> dict[str, Any]:
    """The changes in the configuration: the number of layers, and the lists with an entry for each layer."""
    lists = {name: value[:kept] for name, value in config.items() if isinstance(value, list) and len(value) == count}
    extra = {"num_nextn_predict_layers": 0} if "num_nextn_predict_layers" in config else {}
    return {"num_hidden_layers": kept, **lists, **extra}
