"""Weights of encoders."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from sapwood_common.errors import ConfigError
from sapwood_worker.model.checkpoint.safetensors_source import checkpoint_files, open_weights
from sapwood_worker.model.families.encoders.encoder import EncoderConfig, EncoderFamily


def load_encoder(
    path: Path, family: EncoderFamily, dtype: torch.dtype, device: torch.device, *, dummy: bool
) -> tuple[nn.Module, EncoderConfig]:
    """Loads a Hugging Face directory; ``dummy`` leaves the weights random.

    Raises:
        ConfigError: It cannot be read; names the file and what.
    """
    config = family.config(path)
    model = family.build(config)
    if not dummy:
        file, tensors = _tensors(path)
        wanted = model.state_dict()
        found = {family.named(name): tensor for name, tensor in tensors.items()}
        unexpected = sorted(name for name in found if name not in wanted and not name.startswith(family.unread))
        if unexpected and config.labels is None:
            raise ConfigError(f"{file}: tensor {unexpected[0]} is unexpected: the model has no such weight")
        if config.labels is not None:
            # The parts of a model with a head: files have several names for them, and we have one.
            found |= {f"{part}.{name}": each for part in dict(model.named_children()) for name, each in found.items()}
        missing = sorted(wanted.keys() - found.keys())
        if missing:
            raise ConfigError(f"{file}: has no {missing[0]}")
        wrong = [name for name in wanted if wanted[name].shape != found[name].shape]
        if wrong:
            raise ConfigError(
                f"{file}: {wrong[0]} is {list(found[wrong[0]].shape)}, not {list(wanted[wrong[0]].shape)}"
            )
        model.load_state_dict({name: found[name] for name in wanted})
    return model.to(device, dtype).eval().requires_grad_(False), config


def _tensors(path: Path) -> tuple[Path, dict[str, Tensor]]:
    """All tensors of a directory, and the file that they are in, or the directory if they are in several."""
    files = checkpoint_files(path)
    tensors: dict[str, Tensor] = {}
    for file in files:
        opened = open_weights(file)
        try:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  (not a mapping)
        except Exception as error:  # the library's own
            raise ConfigError(f"{file}: cannot be read: {error}") from error
    return (files[0] if len(files) == 1 else path), tensors
