"""Layers whose weights have 4 or 8 bits, as checkpoints of several formats store them; activations stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sapwood_kernels.ops.contracts import FewRows, Gate, ManyRows, Norm
from sapwood_kernels.ops.device import DeviceOps
from sapwood_kernels.quantised.grouped import GroupedWeight, joined, round_to_groups
from sapwood_worker.model.quantization.int8 import Int8Head
from sapwood_worker.model.quantization.linear_method import (
    Fuses,
    LinearFormat,
    LinearMethod,
    LinearShape,
    Part,
    Stored,
)
from sapwood_worker.model.weight_slot import Span, WeightSlot, WeightSlots

GROUP = 128
"""Inputs that share a scale where we choose."""


@dataclass(frozen=True, slots=True)
class GroupedPart:
    """A projection as a checkpoint stores it.

    Attributes:
        slots: Its tensors.
        weight: Makes the weight of them once they are filled.
    """

    slots: WeightSlots
    weight: Callable[[], GroupedWeight]


class GroupedMethod(LinearMethod):
    """The product with the weights of a layer's parts: one product if all parts have one layout, else one for each layout.

    Args:
        shape: The layer's.
        parts: In the order of the shape's.
        dtype: The dtype of activations and bias.
        ops: The device's operations.
        stored: The checkpoint's contents: a bias is read if it has one, even if the model's configuration names none.
    """

    def __init__(
        self, shape: LinearShape, parts: Sequence[GroupedPart], dtype: torch.dtype, ops: DeviceOps, stored: Stored
    ) -> None:
        self._ops, self._dtype = ops, dtype
        self._parts = list(parts)
        self._biases: WeightSlots = {}
        biased = shape.bias or any(f"{part.name}.bias" in stored.tensors for part in shape.parts)
        self._bias = torch.zeros(shape.rows, dtype=dtype, device=ops.device) if biased else None
        # Where ranks have some of the inputs each, only one of them adds a bias that the layer does not know.
        self._adds_bias = shape.bias or shape.columns.start == 0
        start = 0
        for part in shape.parts:
            end = start + part.rows.size
            if self._bias is not None and (shape.bias or f"{part.name}.bias" in stored.tensors):
                self._biases[f"{part.name}.bias"] = WeightSlot(self._bias[start:end], spans=(part.rows,))
            start = end
        self._products: list[Callable[[Tensor], Tensor]] = []
        self._few: FewRows | None = None
        self._many: ManyRows | None = None

    def slots(self) -> WeightSlots:
        slots = dict(self._biases)
        for part in self._parts:
            slots |= part.slots
        return slots

    def finish(self) -> None:
        if not self._adds_bias:
            self._bias = None
        weights = self._weights()
        self._products = [self._ops.grouped(weight) for weight in weights]
        if len(weights) == 1:
            self._few = self._ops.grouped_few(weights[0], self._bias, self._dtype)
            self._many = self._ops.grouped_many(weights[0], self._dtype)

    def grouped(self) -> GroupedWeight | None:
        weights = self._weights()
        return weights[0] if len(weights) == 1 and self._bias is None else None

    def _weights(self) -> list[GroupedWeight]:
        """The contents of the slots, which the method gives away: all rows, in one weight if they have the same layout."""
        parts, self._parts = self._parts, []
        return joined([part.weight() for part in parts])

    def fuses(self, rows: int) -> Fuses:
        few, many = self._few, self._many
        if few is not None and rows <= few.most:
            return Fuses(norm=rows <= few.norm, gate_after=True, residual=True)
        if many is not None and rows <= many.most:
            return Fuses(norm=True, gate_before=True, residual=True)
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
        before = None if norm is None else (norm.weight, norm.eps)
        if self._few is not None and x.shape[0] <= self._few.most:
            return self._few.product(x, norm=before, gate=gate_after, add_to=residual)
        if self._many is not None and x.shape[0] <= self._many.most:
            result = self._many.product(x, norm=before, gate=gate_before, add_to=residual)
        else:
            results = [product(x) for product in self._products]
            result = results[0] if len(results) == 1 else torch.cat(results, 1)
        return result if self._bias is None else result.add_(self._bias)


def _quantised(shape: LinearShape, dtype: torch.dtype, ops: DeviceOps) -> LinearMethod | None:
    """Groups of :data:`GROUP`, with zeros; None where the inputs are no whole groups."""
    if shape.columns.size % GROUP:
        return None
    wide = torch.empty(shape.rows, shape.columns.size, dtype=dtype, device=ops.device)
    parts = [GroupedPart({name: slot}, partial(_rounded, slot)) for name, slot in shape.slots(wide, None).items()]
    return GroupedMethod(shape, parts, dtype, ops, Stored())


def _rounded(slot: WeightSlot) -> GroupedWeight:
    return round_to_groups(slot.target, GROUP)


def words_format(
    quant_methods: tuple[str, ...], read: Callable[[Part, Span, Stored, torch.device], GroupedPart]
) -> LinearFormat:
    """The format of checkpoints that have words of codes, ``qweight``, for each projection that is quantised.

    Args:
        quant_methods: What ``config.json`` may call it.
        read: A projection of these inputs, as the checkpoint stores it.
    """

    def keep(shape: LinearShape, dtype: torch.dtype, ops: DeviceOps, stored: Stored) -> LinearMethod | None:
        if stored.quant_method not in quant_methods:
            return None
        if not all(f"{part.name}.qweight" in stored.tensors for part in shape.parts):
            return None
        parts = [read(part, shape.columns, stored, ops.device) for part in shape.parts]
        return GroupedMethod(shape, parts, dtype, ops, stored)

    return LinearFormat(keep=keep, quant_methods=quant_methods)


INT4 = LinearFormat(quantise=_quantised, quantise_head=Int8Head)
