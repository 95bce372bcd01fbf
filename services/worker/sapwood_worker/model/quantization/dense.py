"""Weights in the model's dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from sapwood_kernels.ops.device import DeviceOps, Gate, Norm, OneRow
from sapwood_worker.model.quantization.linear_method import Fuses, LinearShape, TableMethod
from sapwood_worker.model.weight_slot import WeightSlots

ONE_ROW = Fuses(norm=True, gate_after=True, residual=True)
"""What the device's product of a single row fuses."""


class DenseMethod(TableMethod):
    """Multiplies as torch does, or by what the device has for it.

    Args:
        shape: The layer's.
        dtype: The dtype of weights and activations.
        ops: The device's operations.
        weight: [N, K] or with more rows, which then are outputs too; None: it is made.
        one_row_dtype: The result's dtype for a single row where the device has a product for it; None: ``dtype``.
    """

    def __init__(
        self,
        shape: LinearShape,
        dtype: torch.dtype,
        ops: DeviceOps,
        *,
        weight: Tensor | None = None,
        one_row_dtype: torch.dtype | None = None,
    ) -> None:
        self._shape = shape
        self._ops = ops
        self._one_row_dtype = one_row_dtype
        if weight is None:
            weight = torch.empty(shape.rows, shape.columns.size, dtype=dtype, device=ops.device)
        self.weight = weight
        self.bias = torch.empty(shape.rows, dtype=dtype, device=ops.device) if shape.bias else None
        self._product: Callable[[Tensor], Tensor] | None = None
        self._one_row: OneRow | None = None
        self._fuses = Fuses()

    def slots(self) -> WeightSlots:
        return self._shape.slots(self.weight, self.bias)

    def finish(self) -> None:
        self._one_row = self._ops.one_row(self.weight, self.bias)
        self._product = self._ops.packed(self.weight, self.bias)
        self._fuses = Fuses(residual=self._product is None and self.bias is None)

    def fuses(self, rows: int) -> Fuses:
        return ONE_ROW if rows == 1 and self._one_row is not None else self._fuses

    def apply(
        self,
        x: Tensor,
        *,
        norm: Norm | None = None,
        gate_before: Gate | None = None,
        gate_after: Gate | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        if self._one_row is not None and x.shape[0] == 1:
            before = None if norm is None else (norm.weight, norm.eps)
            return self._one_row(x, norm=before, gate=gate_after, add_to=residual, dtype=self._one_row_dtype)
        if residual is not None:
            return residual.addmm_(x, self.weight.t())
        return F.linear(x, self.weight, self.bias) if self._product is None else self._product(x)

    def rows(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)
