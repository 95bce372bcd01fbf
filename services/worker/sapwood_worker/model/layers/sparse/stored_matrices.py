"""The matrices that a layer's experts have alike, in a format of linear layers, as the checkpoint stores each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sapwood_common.errors import ConfigError
from sapwood_kernels.experts.stack import ExpertStack, StackOfProducts, StoredStack
from sapwood_kernels.quantised.grouped import GroupedWeight
from sapwood_worker.model.layers.context import LayerContext
from sapwood_worker.model.layers.sparse.places import ExpertPlaces
from sapwood_worker.model.quantization.linear_method import LinearMethod, LinearShape, Part
from sapwood_worker.model.weight_slot import Span, WeightSlots


class StoredMatrices:
    """A matrix of each expert, of one or more projections whose outputs lie side by side: a linear layer each.

    Args:
        parts: What the checkpoint calls the projections.
        places: Which experts are here.
        rows: Which outputs of each projection are computed here.
        columns: Which inputs are multiplied here.
        context: Where and how they are built; its prefix is that of the experts.

    Raises:
        ConfigError: The checkpoint stores an expert in another format than the first.
    """

    def __init__(
        self, parts: Sequence[str], places: ExpertPlaces, rows: Span, columns: Span, context: LayerContext
    ) -> None:
        self._context, self._places, self._outputs = context, places, len(parts) * rows.size
        own = places.own
        self._methods: dict[str, LinearMethod] = {}
        self._slots: WeightSlots = {}
        for expert in range(own.total):
            here = own.start <= expert < own.start + own.size
            taken = rows if here else replace(rows, size=0)
            shape = expert_shape(expert, parts, taken, columns, context)
            method = context.linear.stored_expert(shape)
            if method is None:
                raise ConfigError(f"{shape.parts[0].name}: stored in another format than the layer's first expert")
            if here:
                self._methods[shape.parts[0].name] = method
            # Of those of other ranks nothing is read.
            self._slots |= {
                name: replace(slot, filled=slot.filled or not here) for name, slot in method.slots().items()
            }

    def slots(self) -> WeightSlots:
        """The tensors that a checkpoint fills."""
        return self._slots

    def stack(self) -> ExpertStack:
        """The matrices, once the slots are filled: for a GPU's grouped product in one tensor, else by a product of each.

        Raises:
            ConfigError: The grouped product does not take this format.
        """
        self._slots = {}  # what was read is freed, expert by expert
        if self._context.ops.groups_experts:
            return _stacked(self._methods, self._places.size)
        for method in self._methods.values():
            method.finish()
        return StackOfProducts([method.apply for method in self._methods.values()], self._outputs)


def expert_shape(expert: int, parts: Sequence[str], rows: Span, columns: Span, context: LayerContext) -> LinearShape:
    """An expert's projections as a linear layer."""
    return LinearShape(tuple(Part(f"{context.prefix}.{expert}.{part}", rows) for part in parts), columns)


def _stacked(methods: dict[str, LinearMethod], slots: int) -> StoredStack:
    """One tensor for the codes in so many slots, the experts' first, one for their scales, one for their zeros."""
    codes: Tensor | None = None
    scales, zeros = torch.empty(0), torch.empty(0)
    weight = None
    for index, (name, method) in enumerate(methods.items()):
        weight = _integers(name, method)
        assert weight.zeros is not None
        if codes is None:
            codes, scales, zeros = (
                each.new_empty(slots, *each.shape) for each in (weight.codes, weight.scales, weight.zeros)
            )
        codes[index], scales[index], zeros[index] = weight.codes, weight.scales, weight.zeros
    assert codes is not None and weight is not None
    return StoredStack(codes, scales, weight.group, None, zeros, weight.bits)


def _integers(name: str, method: LinearMethod) -> GroupedWeight:
    """An expert's weight; ConfigError if the grouped product does not take it."""
    weight = method.grouped()
    if weight is not None:
        # A tile's columns are whole groups, or part of one.
        even = weight.group >= weight.columns or (weight.group >= 16 and weight.group & (weight.group - 1) == 0)
        plain = (
            weight.table is None
            and weight.factors is None
            and weight.order is None
            and weight.mins is None
            and weight.zeros is not None
        )
        if even and plain and weight.columns % 2 == 0:
            return weight
    raise ConfigError(
        f"{name}: on a GPU experts are read in integers of 4 and 8 bits without an order, MXFP4 and float8"
    )
