"""An output head in int8 by a scale for each token's row (W8A16): what is rounded of hidden states is their last bits only."""

from __future__ import annotations

import torch
from torch import Tensor

from sapwood_kernels.ops.contracts import Gate, Norm
from sapwood_kernels.ops.device import DeviceOps
from sapwood_kernels.quantised.int8 import WeightProduct, round_weight
from sapwood_worker.model.quantization.linear_method import Fuses, LinearMethod, LinearShape
from sapwood_worker.model.weight_slot import WeightSlots

_FEW = 64
"""Rows up to which logits are float32; to write and read those of more would take as long as reading the weight."""


class Int8Head(LinearMethod):
    """Loads the weight in the model's dtype and rounds it.

    Args:
        shape: The head's, or that of a rank's part.
        rows: Rows of every rank's part; what ``shape`` has less is zeros.
        dtype: The dtype of hidden states.
        ops: The device's operations.
    """

    def __init__(self, shape: LinearShape, rows: int, dtype: torch.dtype, ops: DeviceOps) -> None:
        self._shape, self._ops = shape, ops
        self._wide: Tensor | None = torch.empty(rows, shape.columns.size, dtype=dtype, device=ops.device)
        self._wide[shape.rows :] = 0
        self._product: WeightProduct | None = None

    def slots(self) -> WeightSlots:
        return {} if self._wide is None else self._shape.slots(self._wide, None)

    def finish(self) -> None:
        assert self._wide is not None
        codes, scales = round_weight(self._wide)
        self._wide = None  # before the device lays codes out in its own way
        self._product = self._ops.weight_product(codes, scales)

    def fuses(self, rows: int) -> Fuses:
        return Fuses(norm=True)

    def apply(
        self,
        x: Tensor,
        *,
        norm: Norm | None = None,
        gate_before: Gate | None = None,
        gate_after: Gate | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        assert self._product is not None
        before = None if norm is None else (norm.weight, norm.eps)
        return self._product(x, norm=before, dtype=torch.float32 if len(x) <= _FEW else None)
