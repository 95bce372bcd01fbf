"""Weights and activations in int8 (W8A8): a scale for each output channel, and for each token one of our own."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from sapwood_kernels.ops.contracts import Gate, Norm, OneRow
from sapwood_kernels.ops.device import DeviceOps
from sapwood_kernels.quantised.grouped import GroupedWeight
from sapwood_kernels.quantised.int8 import WeightProduct, round_weight
from sapwood_worker.model.quantization.dense import ONE_ROW
from sapwood_worker.model.quantization.linear_method import (
    Fuses,
    LinearFormat,
    LinearMethod,
    LinearShape,
    Part,
    Stored,
)
from sapwood_worker.model.quantization.packing import stored_slot
from sapwood_worker.model.weight_slot import Span, WeightSlot, WeightSlots, whole

# An output head in int8 by a scale for each token's row (W8A16): what is rounded of hidden states is their last bits
# only.


_FEW = 64
"""Up to this many rows logits are float32; for more rows, writing and reading them would take as long as reading the weight."""


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


_LARGEST = 127.0


class Int8Method(LinearMethod):
    """The product; how the weight comes here is the subclass's business.

    Args:
        shape: The layer's.
        dtype: The dtype of activations and bias.
        ops: The device's operations.

    Attributes:
        weight: int8 [N, K] once it is finished.
        scales: float32 [N, 1] once it is finished.
    """

    weight: Tensor
    scales: Tensor

    def __init__(self, shape: LinearShape, dtype: torch.dtype, ops: DeviceOps) -> None:
        self._shape = shape
        self._ops = ops
        self.bias = torch.empty(shape.rows, dtype=dtype, device=ops.device) if shape.bias else None
        self._one_row: OneRow | None = None

    def slots(self) -> WeightSlots:
        return self._shape.slots(self.weight, self.bias)

    @abstractmethod
    def _filled(self) -> tuple[Tensor, Tensor]:
        """Weight and scales, of what the slots were filled with."""

    def finish(self) -> None:
        self.weight, self.scales = self._filled()
        self._one_row = self._ops.one_row(self.weight, self.bias, self.scales)

    def grouped(self) -> GroupedWeight | None:
        if self.bias is not None:
            return None
        weight, scales = self._filled()
        return GroupedWeight(weight, scales, weight.shape[1], weight.shape[1], bits=8, rounds="row")

    def fuses(self, rows: int) -> Fuses:
        if rows == 1 and self._one_row is not None:
            return ONE_ROW
        alone = self.bias is None
        return Fuses(norm=True, gate_before=True, gate_after=alone, residual=alone)

    def apply(
        self,
        x: Tensor,
        *,
        norm: Norm | None = None,
        gate_before: Gate | None = None,
        gate_after: Gate | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        before = None if norm is None else (norm.weight, norm.eps)
        if self._one_row is not None and x.shape[0] == 1:  # bound by reading the weight: activations stay as they are
            return self._one_row(x, norm=before, gate=gate_after, add_to=residual)
        result = self._ops.int8_product(
            x, self.weight, self.scales, norm=before, gate=gate_before, gate_after=gate_after, add_to=residual
        )
        return result if self.bias is None else result.add_(self.bias)


class QuantisedInt8(Int8Method):
    """Loads the weight in the model's dtype and quantises it; takes the arguments of :class:`Int8Method`."""

    def __init__(self, shape: LinearShape, dtype: torch.dtype, ops: DeviceOps) -> None:
        super().__init__(shape, dtype, ops)
        self.weight = torch.empty(shape.rows, shape.columns.size, dtype=dtype, device=ops.device)

    def _filled(self) -> tuple[Tensor, Tensor]:
        wide = self.weight.float()
        scales = (wide.abs().amax(1, keepdim=True) / _LARGEST).clamp_(min=1e-12)
        return (wide / scales).round_().to(torch.int8), scales


class StoredInt8(Int8Method):
    """Keeps weight and scales as they are stored; a scale of a whole projection becomes one for each of its rows.

    Args:
        shape: See :class:`Int8Method`.
        dtype: See :class:`Int8Method`.
        ops: See :class:`Int8Method`.
        stored: What the checkpoint stores.
    """

    def __init__(self, shape: LinearShape, dtype: torch.dtype, ops: DeviceOps, stored: Stored) -> None:
        super().__init__(shape, dtype, ops)
        self.weight = torch.empty(shape.rows, shape.columns.size, dtype=torch.int8, device=ops.device)
        self._scales: WeightSlots = {
            f"{part.name}.weight_scale": _scale_slot(stored, part, ops.device) for part in shape.parts
        }

    def slots(self) -> WeightSlots:
        return super().slots() | self._scales

    def _filled(self) -> tuple[Tensor, Tensor]:
        parts = zip(self._shape.parts, self._scales.values(), strict=True)
        scales = [slot.target.float().view(-1, 1).expand(part.rows.size, 1) for part, slot in parts]
        self._scales = {}
        return self.weight, torch.cat(scales)


def _scale_slot(stored: Stored, part: Part, device: torch.device) -> WeightSlot:
    name = f"{part.name}.weight_scale"
    found = stored.tensors.get(name)
    sizes = () if found is None else found.shape
    spans = [whole(size) for size in sizes]
    if sizes and sizes[0] == part.rows.total > 1:
        spans[0] = part.rows
    if sum(size > 1 for size in sizes) > 1 or (sizes and max(sizes) not in (1, part.rows.total)):
        raise stored.refusal(name, f"int8 has one scale, or one for each of {part.rows.total} outputs")
    return stored_slot(stored, name, *spans, device=device)


def can_hold(stored: Stored, part: Part, columns: Span) -> bool:
    """Whether a projection is stored as int8 with scales of output channels or one for all, and without zeros."""
    weight, scale = stored.tensors.get(f"{part.name}.weight"), stored.tensors.get(f"{part.name}.weight_scale")
    if weight is None or scale is None or weight.dtype != "I8" or f"{part.name}.weight_zero_point" in stored.tensors:
        return False
    return scale.shape in ((), (1,), (1, 1), (part.rows.total,), (part.rows.total, 1))


INT8 = LinearFormat(quantise=QuantisedInt8)
