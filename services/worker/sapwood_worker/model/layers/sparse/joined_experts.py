"""The experts of a layer where checkpoints hold all of them in one tensor, in the model's dtype or in MXFP4: gpt-oss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sapwood_common.errors import ConfigError
from sapwood_kernels.experts.activation import ClampedGate
from sapwood_kernels.experts.stack import DenseStack, ExpertStack, StackOfProducts, StoredStack
from sapwood_worker.model.layers.context import LayerContext
from sapwood_worker.model.layers.layer import Layer
from sapwood_worker.model.layers.sparse.matrices import finished, stack_of
from sapwood_worker.model.layers.sparse.placed_sum import PlacedSum
from sapwood_worker.model.layers.sparse.places import ExpertPlaces
from sapwood_worker.model.weight_slot import Span, WeightSlot, WeightSlots, whole
from sapwood_worker.records.experts import ExpertMove

_GROUP = 32
"""Numbers that share a scale in MXFP4."""
_BLOCK = 1 + _GROUP // 2
"""Bytes of them with their exponent, which comes first in the kernel's order."""


class _Stack(ABC):
    """One matrix, [N, K] with a bias [N], of each of a layer's experts.

    Args:
        name: In checkpoints.
        places: Which experts are here.
        rows: Which of the N are computed here.
        columns: Which of the K are multiplied here.
        context: Where and how it is built.
    """

    def __init__(self, name: str, places: ExpertPlaces, rows: Span, columns: Span, context: LayerContext) -> None:
        self._name, self._own, self._rows, self._columns, self._context = name, places.own, rows, columns, context
        self._bias = torch.empty(places.size, rows.size, dtype=context.dtype, device=context.device)

    def slots(self) -> WeightSlots:
        """The tensors that a checkpoint fills."""
        return {f"{self._name}_bias": WeightSlot(self._bias[: self._own.size], spans=(self._own, self._rows))}

    def stack(self) -> ExpertStack:
        """The matrices, once the slots are filled. Of ranks that each have some of the inputs, the first adds the bias."""
        return self._stack(self._bias if self._columns.start == 0 else None)

    @abstractmethod
    def _stack(self, bias: Tensor | None) -> ExpertStack:
        """The matrices with a bias."""


class _WideStack(_Stack):
    """In the model's dtype; checkpoints hold each matrix as [K, N]."""

    def __init__(self, name: str, places: ExpertPlaces, rows: Span, columns: Span, context: LayerContext) -> None:
        super().__init__(name, places, rows, columns, context)
        self._weight = torch.empty(places.size, rows.size, columns.size, dtype=context.dtype, device=context.device)

    def slots(self) -> WeightSlots:
        if not self._weight.numel():  # quantised
            return super().slots()
        spans = self._own, self._columns, self._rows
        return {self._name: WeightSlot(self._weight[: self._own.size].transpose(1, 2), spans=spans), **super().slots()}

    def _stack(self, bias: Tensor | None) -> ExpertStack:
        made = finished(self._weight, self._own.size, self._context, bias)
        if not isinstance(made, DenseStack):
            self._weight = self._weight.new_empty(0)
        return made


class _Mxfp4Stack(_Stack):
    """In 4-bit floats with an exponent for each 32 of a row, as stored; where a CPU's kernel multiplies them, in its order."""

    def __init__(self, name: str, places: ExpertPlaces, rows: Span, columns: Span, context: LayerContext) -> None:
        super().__init__(name, places, rows, columns, context)
        if any(size % _GROUP for size in (columns.start, columns.size)):
            raise ConfigError(
                f"{name}: columns {columns.start} to {columns.start + columns.size} are no whole blocks of 32"
            )
        self._groups = Span(*(size // _GROUP for size in (columns.start, columns.size, columns.total)))
        shape = places.size, rows.size, self._groups.size
        self._packed: Tensor | None = None
        if not context.ops.groups_experts and self._product(torch.empty(0, _BLOCK, dtype=torch.uint8), _GROUP):
            self._packed = torch.empty(*shape, _BLOCK, dtype=torch.uint8, device=context.device)
            self._scales, self._blocks = self._packed[..., 0], self._packed[..., 1:]
            return
        self._blocks = torch.empty(*shape, _GROUP // 2, dtype=torch.uint8, device=context.device)
        self._scales = torch.empty(shape, dtype=torch.uint8, device=context.device)

    def slots(self) -> WeightSlots:
        spans = self._own, self._rows, self._groups
        return {
            f"{self._name}_blocks": WeightSlot(self._blocks[: self._own.size], spans=(*spans, whole(_GROUP // 2))),
            f"{self._name}_scales": WeightSlot(self._scales[: self._own.size], spans=spans),
            **super().slots(),
        }

    def _stack(self, bias: Tensor | None) -> ExpertStack:
        if self._packed is None:
            return stack_of(StoredStack(self._blocks.flatten(2), self._scales, _GROUP, bias), self._context)
        for codes in self._blocks:
            # A byte has neighbours; the kernel's have two numbers 16 apart.
            numbers = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
            codes.copy_(numbers[..., : _GROUP // 2] | numbers[..., _GROUP // 2 :] << 4)
        products = [self._product(rows, self._columns.size) for rows in self._packed.flatten(2)]
        return StackOfProducts([product for product in products if product], self._rows.size, bias)

    def _product(self, rows: Tensor, columns: int) -> Callable[[Tensor], Tensor] | None:
        """A matrix's, of its rows' bytes, [N, bytes]; None: there is no kernel."""
        product = self._context.ops.gguf_product([("MXFP4", rows)], columns)
        return None if product is None else lambda x: product(x.float()).to(x.dtype)


class JoinedExperts(Layer):
    """The weighted sum of each token's experts, MLPs with biases whose gates and ups take turns. Ranks have a part of each, or
    some of them whole.

    Args:
        hidden_size: Width in and out.
        intermediate_size: Width of an expert's gate and up.
        count: How many experts there are.
        chosen: How many a token goes to.
        activation: What gate and up are joined by.
        context: Where and how it is built.

    Attributes:
        places: Where they are.

    Raises:
        ConfigError: They cannot be split over so many ranks.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        count: int,
        chosen: int,
        *,
        activation: ClampedGate,
        context: LayerContext,
    ) -> None:
        super().__init__()
        self._context, self._activation, self._chosen = context, activation, chosen
        inner, outer = context.parallel.shard_expert("intermediate_size", intermediate_size), whole(hidden_size)
        self.places = ExpertPlaces(count, context.parallel, context.ops)
        both = Span(2 * inner.start, 2 * inner.size, 2 * inner.total)
        names = f"{context.prefix}.gate_up_proj", f"{context.prefix}.down_proj"
        stored = context.linear.keeps("fp4", f"{names[0]}_blocks")
        if not stored:
            context.linear.check_experts(names)
        kind = _Mxfp4Stack if stored else _WideStack
        self._gate_up = kind(names[0], self.places, both, outer, context)
        self._down = kind(names[1], self.places, outer, inner, context)
        self._sum: PlacedSum

    def slots(self) -> WeightSlots:
        return self._gate_up.slots() | self._down.slots()

    def finish(self) -> None:
        stacks = self._gate_up.stack(), self._down.stack()
        self._sum = PlacedSum(self.places, *stacks, self._activation, self._chosen, self._context)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor, add_to: Tensor | None = None) -> Tensor:
        """[T, hidden_size] and what the router chose, [T, k] each -> [T, hidden_size], this rank's part of the sum; of one rank
        it may be added to ``add_to`` in place, which is returned then."""
        return self._sum(x, ids, weights, add_to)

    def move(self, moves: Sequence[ExpertMove]) -> None:
        """Moves experts between ranks; all ranks make the same call."""
        self._sum.move(moves)
