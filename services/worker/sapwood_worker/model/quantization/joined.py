"""A layer whose projections are in different formats."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sapwood_kernels.ops.contracts import Gate, Norm
from sapwood_worker.model.quantization.linear_method import Fuses, LinearMethod
from sapwood_worker.model.weight_slot import WeightSlots


class JoinedMethod(LinearMethod):
    """Multiplies with each projection by itself.

    Args:
        methods: One for each projection, in the order of outputs.
    """

    def __init__(self, methods: Sequence[LinearMethod]) -> None:
        self._methods = methods

    def slots(self) -> WeightSlots:
        slots: WeightSlots = {}
        for method in self._methods:
            slots |= method.slots()
        return slots

    def finish(self) -> None:
        for method in self._methods:
            method.finish()

    def fuses(self, rows: int) -> Fuses:
        return Fuses()

    def apply(
        self,
        x: Tensor,
        *,
        norm: Norm | None = None,
        gate_before: Gate | None = None,
        gate_after: Gate | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        return torch.cat([method.apply(x) for method in self._methods], 1)
