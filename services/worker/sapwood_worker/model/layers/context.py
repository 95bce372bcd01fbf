"""What a layer is built with."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.quantization.registry import LinearMethods


@dataclass(frozen=True, slots=True)
class LayerContext:
    """Where and how a layer is built.

    Attributes:
        dtype: The dtype of activations.
        ops: The operations of the device where the weights lie.
        linear: Gives linear layers their methods.
        prefix: The layer's name in a Hugging Face checkpoint.
    """

    dtype: torch.dtype
    ops: DeviceOps
    linear: LinearMethods
    prefix: str = ""

    def inside(self, name: str) -> LayerContext:
        """The same for a layer called ``name`` inside this one."""
        return replace(self, prefix=f"{self.prefix}.{name}" if self.prefix else name)

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.ops.device
