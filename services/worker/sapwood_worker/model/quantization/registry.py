"""The formats of weights; packages add theirs as entry points of ``GROUP``, each a ``LinearFormat``."""

from __future__ import annotations

import torch

from sapwood_common.errors import ConfigError
from sapwood_common.plugins import find_part, part_names
from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.config import LINEAR_METHODS as GROUP
from sapwood_worker.model.quantization.dense import DenseMethod
from sapwood_worker.model.quantization.float8 import FP8, FP8_BLOCK, FP8_TENSOR
from sapwood_worker.model.quantization.linear_method import LinearFormat, LinearMethod, LinearShape, Stored

FORMATS = {"none": LinearFormat(), "fp8": FP8, "fp8_block": FP8_BLOCK, "fp8_tensor": FP8_TENSOR}


class LinearMethods:
    """Gives each linear layer of a model its method: what a checkpoint stores in a known format is kept, the rest quantised.

    Args:
        quantization: Name of the format in which to quantise; ``none``: not at all.
        dtype: The dtype of activations, and of weights in no format.
        ops: The device's operations.
        stored: What the checkpoint stores; None: nothing is kept.

    Attributes:
        used: The formats that layers have; ``none``: the model's dtype.

    Raises:
        ConfigError: There is no such format, or weights cannot be quantised to it.
    """

    def __init__(self, quantization: str, dtype: torch.dtype, ops: DeviceOps, stored: Stored | None = None) -> None:
        formats = {name: find_part(GROUP, name, FORMATS) for name in part_names(GROUP, FORMATS)}
        wanted = find_part(GROUP, quantization, FORMATS).quantise
        if wanted is None and quantization != "none":
            raise ConfigError(f"--quantization: weights are read in {quantization!r}, not quantised to it")
        self._name, self._quantise = quantization, wanted
        self._keep = [(name, each.keep) for name, each in formats.items() if each.keep is not None]
        self._dtype = dtype
        self._ops = ops
        self._stored = stored
        self.used: set[str] = set()

    def method(self, shape: LinearShape) -> LinearMethod:
        """The method of a layer."""
        if self._stored is not None:
            for name, keep in self._keep:
                kept = keep(shape, self._dtype, self._ops, self._stored)
                if kept is not None:
                    self.used.add(f"{name} as stored")
                    return kept
        quantised = self._quantise(shape, self._dtype, self._ops) if self._quantise is not None else None
        self.used.add("none" if quantised is None else self._name)
        return quantised or DenseMethod(shape, self._dtype, self._ops)
