"""The base of all layers and models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from sapwood_worker.model.weight_slot import WeightSlots


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
        """Readies it and all layers inside it for use, but for those that are ready; called when their slots are filled."""
        for layer in self._all():
            if not layer._ready:
                layer.finish()
                layer._ready = True

    def slots(self) -> WeightSlots:
        """The slots of its own tensors."""
        return {}

    def finish(self) -> None:
        """Readies its own tensors for use."""

    def _all(self) -> Iterator[Layer]:
        return (each for each in self.modules() if isinstance(each, Layer))
