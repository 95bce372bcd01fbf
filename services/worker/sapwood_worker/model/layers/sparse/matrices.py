"""The matrices that a layer's experts have alike, filled expert by expert: in the model's dtype, or in float8 as stored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sapwood_kernels.experts.stack import DenseStack, ExpertStack, StackOfProducts, StoredStack
from sapwood_worker.model.layers.context import LayerContext
from sapwood_worker.model.layers.sparse.places import ExpertPlaces
from sapwood_worker.model.layers.sparse.stored_matrices import StoredMatrices, expert_shape
from sapwood_worker.model.weight_slot import Span, WeightSlot, WeightSlots

_BLOCK = 128
"""Rows and columns of a float8 weight that share a scale."""


class ExpertMatrices(ABC):
    """A matrix of each expert, of one or more of a checkpoint's projections whose outputs lie side by side.

    Args:
        parts: What the checkpoint calls them.
        places: Which experts are here.
        rows: Which outputs of each projection are computed here.
        columns: Which inputs are multiplied here.
        context: Where and how they are built; its prefix is that of the experts.
    """

    def __init__(
        self, parts: Sequence[str], places: ExpertPlaces, rows: Span, columns: Span, context: LayerContext
    ) -> None:
        self._parts, self._own, self._rows, self._columns, self._context = parts, places.own, rows, columns, context
        shape = places.size, len(parts), rows.size, columns.size
        self._weight = torch.empty(shape, dtype=self._dtype, device=context.device)

    @property
    def _dtype(self) -> torch.dtype:
        return self._context.dtype

    def slots(self) -> WeightSlots:
        """The tensors that a checkpoint fills, each a view."""
        return self._each("weight", self._weight, self._rows, self._columns)

    @abstractmethod
    def stack(self) -> ExpertStack:
        """The matrices, once the slots are filled."""

    def _each(self, kind: str, tensor: Tensor, rows: Span, columns: Span) -> WeightSlots:
        """A slot of a kind for each projection of each expert; of those of other ranks nothing is read."""
        nothing = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        others = WeightSlot(nothing, spans=(replace(rows, size=0), replace(columns, size=0)), filled=True)
        slots = {}
        for expert in range(self._own.total):
            here = expert - self._own.start
            for place, part in enumerate(self._parts):
                slot = others
                if 0 <= here < self._own.size:
                    slot = WeightSlot(tensor[here, place], spans=(rows, columns))
                slots[f"{self._context.prefix}.{expert}.{part}.{kind}"] = slot
        return slots


class WideMatrices(ExpertMatrices):
    """In the model's dtype."""

    def stack(self) -> ExpertStack:
        return DenseStack(self._weight.flatten(1, 2))


class StackedMatrices(WideMatrices):
    """The same where the checkpoint holds each projection of all experts as one tensor, each transposed: [E, K, N]."""

    def slots(self) -> WeightSlots:
        spans = self._own, self._columns, self._rows
        return {
            f"{self._context.prefix}.{part}": WeightSlot(
                self._weight[: self._own.size, at].transpose(1, 2), spans=spans
            )
            for at, part in enumerate(self._parts)
        }


class Float8Matrices(ExpertMatrices):
    """In float8 with a scale for each block of 128 x 128; activations stay as they are."""

    def __init__(
        self, parts: Sequence[str], places: ExpertPlaces, rows: Span, columns: Span, context: LayerContext
    ) -> None:
        super().__init__(parts, places, rows, columns, context)
        self._blocks = _in_blocks(rows), _in_blocks(columns)
        shape = places.size, len(parts), *(span.size for span in self._blocks)
        self._scales = torch.empty(shape, dtype=torch.float32, device=context.device)

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn

    def slots(self) -> WeightSlots:
        return super().slots() | self._each("weight_scale_inv", self._scales, *self._blocks)

    def stack(self) -> ExpertStack:
        # A scale for each row and group: 3 % of the weight. One part's rows, cut, would still lie whole blocks apart.
        scales = self._scales.repeat_interleave(_BLOCK, 2)[:, :, : self._rows.size].flatten(1, 2).contiguous()
        return stack_of(StoredStack(self._weight.flatten(1, 2), scales, _BLOCK), self._context)


def expert_matrices(
    parts: Sequence[str], places: ExpertPlaces, rows: Span, columns: Span, context: LayerContext
) -> ExpertMatrices | StoredMatrices:
    """The matrices in the format that the checkpoint stores those of the first expert in.

    Raises:
        ConfigError: It cannot be read, or experts are to be quantised.
    """
    if context.linear.stored_expert(expert_shape(0, parts, replace(rows, size=0), columns, context)) is not None:
        return StoredMatrices(parts, places, rows, columns, context)
    names = [f"{context.prefix}.{index}.{part}" for index in range(places.own.total) for part in parts]
    whole_blocks = rows.start % _BLOCK == columns.start % _BLOCK == 0
    context.linear.check_experts(names)
    if whole_blocks and all(context.linear.keeps_float8(name, _BLOCK) for name in names[: len(parts)]):
        return Float8Matrices(parts, places, rows, columns, context)
    return WideMatrices(parts, places, rows, columns, context)


def stack_of(stored: StoredStack, context: LayerContext) -> ExpertStack:
    """Experts' matrices in few bits: for a GPU's grouped product as they are, else by a product of each."""
    if context.ops.groups_experts:
        return stored
    return StackOfProducts([context.ops.grouped(each) for each in stored.weights()], stored.outputs, stored.bias)


def _in_blocks(span: Span) -> Span:
    return Span(span.start // _BLOCK, -(-span.size // _BLOCK), -(-span.total // _BLOCK))
