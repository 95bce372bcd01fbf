"""What a layer is built with."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.distributed.group import Group
from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.model.quantization.registry import LinearMethods


@dataclass(frozen=True, slots=True)
class LayerContext:
    """Where and how a layer is built.

    Attributes:
        dtype: The dtype of activations.
        ops: The operations of the device where the weights lie.
        linear: Gives linear layers their methods.
        parallel: The groups of ranks that the layer is split over.
        prefix: The layer's name in a Hugging Face checkpoint.
    """

    dtype: torch.dtype
    ops: DeviceOps
    linear: LinearMethods
    parallel: Parallel
    prefix: str = ""

    def inside(self, name: str) -> LayerContext:
        """The context of a layer called ``name`` inside this one."""
        return replace(self, prefix=f"{self.prefix}.{name}" if self.prefix else name)

    @property
    def split_over(self) -> Group | None:
        """The group that the layer is split over; None: there is but one rank, and nothing to exchange."""
        return self.parallel.tp if self.parallel.tp.size > 1 else None

    @property
    def attending(self) -> LayerContext:
        """This context for attention or the vocabulary, which ranks with requests of their own have whole."""
        return replace(self, parallel=self.parallel.attending)

    @property
    def joined(self) -> LayerContext:
        """This context for an MLP, which all ranks compute together."""
        return replace(self, parallel=self.parallel.joined)

    @property
    def dispatched(self) -> LayerContext:
        """This context for a mixture of experts to which each rank sends its own rows."""
        return replace(self, parallel=self.parallel.dispatched)

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.ops.device
