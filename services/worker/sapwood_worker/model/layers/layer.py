"""What a layer is built with."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.distributed.group import Group
from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.model.quantization.linear_method import LinearMethod, Renewal
from sapwood_worker.model.quantization.registry import LinearMethods
from sapwood_worker.model.weight_slot import WeightSlots

# What a layer is built with.


@dataclass(frozen=True, slots=True)
class LayerContext:
    """Where and how a layer is built.

    Attributes:
        dtype: The dtype of activations.
        ops: The operations of the device where the weights lie.
        linear: Gives linear layers their methods.
        parallel: The groups of ranks that the layer is split over.
        prefix: The layer's name in a Hugging Face checkpoint.
        adapted: Whether linear layers may get adapters, so that each of them must remain a layer of its own.
    """

    dtype: torch.dtype
    ops: DeviceOps
    linear: LinearMethods
    parallel: Parallel
    prefix: str = ""
    adapted: bool = False

    def inside(self, name: str) -> LayerContext:
        """The context of a layer called ``name`` inside this one."""
        return replace(self, prefix=f"{self.prefix}.{name}" if self.prefix else name)

    @property
    def split_over(self) -> Group | None:
        """The group that the layer is split over; None: there is only one rank, so nothing to exchange."""
        return self.parallel.tp if self.parallel.tp.size > 1 else None

    @property
    def attending(self) -> LayerContext:
        """This context for attention or the vocabulary, which data-parallel attention does not split."""
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


class Layer(nn.Module):
    """A torch module whose call is its ``forward`` and nothing else.

    torch's own call looks for hooks first. A decode step calls some 240 modules for a few microseconds of work each, and on a
    CPU that look-up was a quarter of the time outside the matrix products. Hooks on a Layer are not called.
    """

    _ready = False

    def __call__(self, *args: Any) -> Any:
        """``forward(*args)``."""
        return self.forward(*args)

    def weights(self) -> WeightSlots:
        """The slots of its tensors and of those of all layers inside it."""
        slots: WeightSlots = {}
        for layer in self._all():
            slots |= layer.slots()
        return slots

    def prepare(self) -> None:
        """Prepares it and all layers inside it for use, except those that are ready; called when their slots are filled."""
        for layer in self._all():
            if not layer._ready:
                layer.finish()
                layer._ready = True

    def slots(self) -> WeightSlots:
        """The slots of its own tensors."""
        return {}

    def finish(self) -> None:
        """Readies its own tensors for use. Called again when they have changed, where :attr:`renewal` is ``copy``."""

    def forget_copies(self) -> None:
        """Lets go of copies that :meth:`finish` has made of its weights, and will make again."""

    @property
    def renewal(self) -> Renewal:
        """How its own weights change while the model serves. Here: as its slots are."""
        return "copy"

    @property
    def weight_name(self) -> str:
        """What to call its weights in messages: the name of one of them, where its slots tell it."""
        return next(iter(self.slots()), type(self).__name__)

    def depends_on(self) -> Collection[str]:
        """The weights after whose change :meth:`finish` is to be called again."""
        return self.slots().keys()

    def _all(self) -> Iterator[Layer]:
        return (each for each in self.modules() if isinstance(each, Layer))


@runtime_checkable
class RebuiltLayer(Protocol):
    """A layer whose weights may be of a method that is exchanged as a whole: where its ``renewal`` is ``rebuild``."""

    def rebuilt(self) -> LinearMethod:
        """A new method for its weights, to be filled and finished. Changes nothing."""

    def put_method(self, method: LinearMethod) -> LinearMethod:
        """Computes with another method from now on; returns the one before."""
