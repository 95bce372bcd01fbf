"""Weights in the model's dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from sapwood_kernels.ops.contracts import FewRows, Gate, Norm, OneRow
from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.quantization.linear_method import Fuses, LinearShape, TableMethod
from sapwood_worker.model.weight_slot import WeightSlots

ONE_ROW = Fuses(norm=True, gate_after=True, residual=True)
"""The operations that the device's product of a single row fuses."""


class DenseMethod(TableMethod):
    """Multiplies as torch does, or by what the device has for it.

    Args:
        shape: The layer's.
        dtype: The dtype of weights and activations.
        ops: The device's operations.
        weight: [N, K] or with more rows, which then are outputs too; None: it is made.
        few_dtype: The result's dtype for a row or few where the device has a product for them; None: ``dtype``.
    """

    renewal = "copy"

    def __init__(
        self,
        shape: LinearShape,
        dtype: torch.dtype,
        ops: DeviceOps,
        *,
        weight: Tensor | None = None,
        few_dtype: torch.dtype | None = None,
    ) -> None:
        self._shape = shape
        self._ops = ops
        self._few_dtype = few_dtype
        if weight is None:
            weight = torch.empty(shape.rows, shape.columns.size, dtype=dtype, device=ops.device)
        self.weight = weight
        self.bias = torch.empty(shape.rows, dtype=dtype, device=ops.device) if shape.bias else None
        self._product: Callable[[Tensor], Tensor] | None = None
        self._one_row: OneRow | None = None
        self._few: FewRows | None = None
        self._fuses = Fuses()

    def slots(self) -> WeightSlots:
        return self._shape.slots(self.weight, self.bias)

    def finish(self) -> None:
        self._one_row = self._ops.one_row(self.weight, self.bias)
        self._few = self._ops.few_rows(self.weight, self.bias)
        self._product = self._ops.packed(self.weight, self.bias)
        self._fuses = Fuses(residual=self._product is None and self.bias is None)

    def forget_copies(self) -> None:
        self._product = self._one_row = self._few = None

    def fuses(self, rows: int) -> Fuses:
        if rows == 1 and self._one_row is not None:
            return ONE_ROW
        few = self._few
        if few is not None and rows <= few.most:
            return Fuses(norm=rows <= few.norm, gate_after=True, residual=True)
        return self._fuses

    def apply(
        self,
        x: Tensor,
        *,
        norm: Norm | None = None,
        gate_before: Gate | None = None,
        gate_after: Gate | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        fused = self._one_row if x.shape[0] == 1 else None
        if fused is None and self._few is not None and x.shape[0] <= self._few.most:
            fused = self._few.product
        if fused is not None:
            before = None if norm is None else (norm.weight, norm.eps)
            return fused(x, norm=before, gate=gate_after, add_to=residual, dtype=self._few_dtype)
        if residual is not None:
            return residual.addmm_(x, self.weight.t())
        return F.linear(x, self.weight, self.bias) if self._product is None else self._product(x)

    def rows(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)
