"""The matrices that a layer's experts have alike: read in the model's dtype into their places, and quantised there if wanted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sapwood_kernels.experts.stack import DenseStack, ExpertStack, StackOfProducts, StoredStack
from sapwood_worker.model.layers.context import LayerContext
from sapwood_worker.model.layers.sparse.places import ExpertPlaces
from sapwood_worker.model.layers.sparse.stored_matrices import StoredMatrices, expert_shape, stack_of_methods
from sapwood_worker.model.quantization.linear_method import LinearMethod, LinearShape, Part
from sapwood_worker.model.weight_slot import Span, WeightSlot, WeightSlots, whole


class WideMatrices:
    """A matrix of each expert, of one or more of a checkpoint's projections whose outputs lie side by side.

    Args:
        parts: What the checkpoint calls them.
        places: Which experts are here.
        rows: Which outputs of each projection are computed here.
        columns: Which inputs are multiplied here.
        context: Where and how they are built; its prefix is that of the experts.
        room: For how many experts more, which others fill.

    Attributes:
        room: The argument; 0 where matrices are quantised.
    """

    def __init__(
        self,
        parts: Sequence[str],
        places: ExpertPlaces,
        rows: Span,
        columns: Span,
        context: LayerContext,
        room: int = 0,
    ) -> None:
        self._parts, self._own, self._rows, self._columns, self._context = parts, places.own, rows, columns, context
        each = len(parts), rows.size, columns.size
        kept = context.linear.rounded(_wide_shape(each[0] * each[1], each[2], context)) is None
        self.room = room if kept else 0
        self._weight = torch.empty(places.size + self.room, *each, dtype=context.dtype, device=context.device)

    def give_up_room(self) -> None:
        """Has no room for others any more; before anything is read."""
        self._weight = self._weight.new_empty(len(self._weight) - self.room, *self._weight.shape[1:])
        self.room = 0

    def others(self) -> Tensor:
        """The room for others, [room, parts, rows, columns]."""
        return self._weight[len(self._weight) - self.room :]

    def slots(self) -> WeightSlots:
        """The tensors that a checkpoint fills, each a view: one for each projection of each expert; of those of other ranks
        nothing is read."""
        if not self._weight.numel():
            return {}
        nothing = self._weight.new_empty(0)
        others = WeightSlot(nothing, spans=(replace(self._rows, size=0), replace(self._columns, size=0)), filled=True)
        slots = {}
        for expert in range(self._own.total):
            here = expert - self._own.start
            for place, part in enumerate(self._parts):
                slot = others
                if 0 <= here < self._own.size:
                    slot = WeightSlot(self._weight[here, place], spans=(self._rows, self._columns))
                slots[f"{self._context.prefix}.{expert}.{part}.weight"] = slot
        return slots

    def stack(self) -> ExpertStack:
        """The matrices, once the slots are filled; quantised ones are no longer held as they were read."""
        made = finished(self._weight.flatten(1, 2), self._own.size, self._context)
        if not isinstance(made, DenseStack):
            self._weight = self._weight.new_empty(0)
        return made


class StackedMatrices(WideMatrices):
    """The same where the checkpoint holds each projection of all experts as one tensor, each transposed: [E, K, N]."""

    def slots(self) -> WeightSlots:
        if not self._weight.numel():
            return {}
        spans = self._own, self._columns, self._rows
        return {
            f"{self._context.prefix}.{part}": WeightSlot(
                self._weight[: self._own.size, at].transpose(1, 2), spans=spans
            )
            for at, part in enumerate(self._parts)
        }


def expert_matrices(
    parts: Sequence[str], places: ExpertPlaces, rows: Span, columns: Span, context: LayerContext, room: int = 0
) -> WideMatrices | StoredMatrices:
    """The matrices in the format that the checkpoint stores those of the first expert in, else in the model's dtype, then with
    room for others.

    Raises:
        ConfigError: It cannot be read.
    """
    if context.linear.stored_expert(expert_shape(0, parts, replace(rows, size=0), columns, context)) is not None:
        return StoredMatrices(parts, places, rows, columns, context)
    names = [f"{context.prefix}.{index}.{part}" for index in range(places.own.total) for part in parts]
    context.linear.check_experts(names)
    return WideMatrices(parts, places, rows, columns, context, room)


def finished(weight: Tensor, own: int, context: LayerContext, bias: Tensor | None = None) -> ExpertStack:
    """Matrices in the model's dtype as they are to be multiplied: quantised if that is wanted and they can be, expert by expert.

    Args:
        weight: [E, N, K].
        own: How many of them a checkpoint has filled, the first ones.
        context: Where and how they are built.
        bias: [E, N], or None.
    """

    _, rows, columns = weight.shape

    def rounded() -> Iterator[tuple[str, LinearMethod]]:
        for index in range(own):
            method = context.linear.rounded(_wide_shape(rows, columns, context))
            assert method is not None
            [slot] = method.slots().values()
            slot.target.copy_(weight[index])
            yield f"{context.prefix}.{index}", method

    if context.linear.rounded(_wide_shape(rows, columns, context)) is None:
        return DenseStack(weight, bias)
    return stack_of_methods(rounded(), len(weight), weight.shape[1], context, bias)


def _wide_shape(rows: int, columns: int, context: LayerContext) -> LinearShape:
    """An expert's matrix, as much of it as is here, as a linear layer."""
    return LinearShape((Part(context.prefix, whole(rows)),), whole(columns))


def stack_of(stored: StoredStack, context: LayerContext) -> ExpertStack:
    """Experts' matrices in few bits: for a GPU's grouped product as they are, else by a product of each."""
    if context.ops.groups_experts:
        return stored
    products = [context.ops.grouped(stored.weight(expert)) for expert in range(stored.experts)]
    return StackOfProducts(products, stored.outputs, stored.bias)
