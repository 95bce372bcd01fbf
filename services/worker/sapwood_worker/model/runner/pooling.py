"""Pools the hidden states of a prompt's chunk for its embedding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sapwood_common.errors import ConfigError
from sapwood_worker.model.checkpoint.safetensors_source import checkpoint_files, open_weights
from sapwood_worker.model.checkpoint.sentence_config import DenseModule


class Pooler:
    """Makes a vector of a chunk's hidden states; the scheduler joins those of the chunks.

    Args:
        modules: What changes pooled vectors, in order.
        hidden_size: Numbers of a hidden state.
        device: Where hidden states are.
        whole: Whether each chunk is a whole prompt.

    Attributes:
        size: Numbers of a vector.

    Raises:
        ConfigError: A module does not fit, or cannot be read; names it.
    """

    def __init__(self, modules: Sequence[DenseModule], hidden_size: int, device: torch.device, *, whole: bool) -> None:
        self.size = modules[-1].outputs if modules else hidden_size
        if modules and modules[0].inputs != hidden_size:
            raise ConfigError(
                f"{modules[0].folder / 'config.json'}: in_features is {modules[0].inputs}; the model gives {hidden_size} numbers"
            )
        if not whole and any(module.tanh for module in modules):
            file = modules[0].folder / "config.json"
            raise ConfigError(f"{file}: activation_function Tanh is not supported after a decoder (Identity is)")
        self._parts = [(module.tanh, *_read(module, device)) for module in modules]

    def pool(self, hidden: Tensor, pooling: str) -> Tensor:
        """Pools a chunk.

        Args:
            hidden: [T, hidden_size], after the final norm.
            pooling: ``mean``, ``last`` or ``cls``.

        Returns:
            float32 [size]: T times the mean, or the last row, or the first.
        """
        if pooling != "mean":
            return self._change((hidden[-1] if pooling == "last" else hidden[0]).float())
        # What is linear may be computed for each chunk; the sums of chunks are the sum of all.
        return self._change(hidden.float().mean(0)) * len(hidden) if self._parts else hidden.float().sum(0)

    def _change(self, vector: Tensor) -> Tensor:
        for tanh, weight, bias in self._parts:
            vector = torch.addmv(bias, weight, vector)
            if tanh:
                vector = vector.tanh()
        return vector


def _read(module: DenseModule, device: torch.device) -> tuple[Tensor, Tensor]:
    """A module's weight, float32 [outputs, inputs], and its bias, float32 [outputs]: zeros if it has none."""
    [file] = checkpoint_files(module.folder)[:1]
    opened = open_weights(file)
    shapes: dict[str, tuple[int, ...]] = {"linear.weight": (module.outputs, module.inputs)}
    if module.bias:
        shapes["linear.bias"] = (module.outputs,)
    found = {"linear.bias": torch.zeros(module.outputs)}
    for name, shape in shapes.items():
        if name not in opened.keys():  # noqa: SIM118  (not a mapping)
            raise ConfigError(f"{file}: has no {name}")
        if (given := tuple(opened.get_slice(name).get_shape())) != shape:
            raise ConfigError(f"{file}: {name} is {list(given)}, not {list(shape)}")
        found[name] = opened.get_tensor(name).float()
    return found["linear.weight"].to(device), found["linear.bias"].to(device)
