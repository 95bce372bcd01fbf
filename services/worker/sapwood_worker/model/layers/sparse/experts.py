"""The experts of a layer, stacked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from sapwood_common.errors import ConfigError
from sapwood_kernels.experts.reference import ClampedGate
from sapwood_kernels.experts.stack import DenseStack, ExpertStack, StackOfProducts, StoredStack, stacked
from sapwood_kernels.ops.contracts import Gate
from sapwood_kernels.quantised.grouped import GroupedWeight
from sapwood_worker.model.layers.layer import Layer, LayerContext
from sapwood_worker.model.layers.sparse.places import ExpertPlaces, PlacedSum
from sapwood_worker.model.quantization.linear_method import LinearMethod, LinearShape, Part, Renewal
from sapwood_worker.model.weight_slot import Span, WeightSlot, WeightSlots, whole
from sapwood_worker.records.expert_load import ExpertMove

Stacked = Literal["transposed", "rows"]


class Experts(Layer):
    """The weighted sum of each token's experts, gated MLPs without biases. Each rank has a part of every expert, or some experts
    whole. The matrices of all experts are two tensors, and each tensor of the checkpoint is read into its place there.

    Args:
        hidden_size: Width in and out.
        intermediate_size: Width of an expert's gate and up.
        count: How many experts there are.
        chosen: How many a token goes to.
        projections: What checkpoints call an expert's gate, up and down.
        activation: The gate's activation.
        stacked: Whether checkpoints hold each projection of all experts as one transposed tensor; a quantised checkpoint may
            still hold them separately.
        shared: As how many additional experts, to which every token goes, a shared expert may be computed (:meth:`join`).
        context: Where and how it is built.

    Attributes:
        places: Where they are.
        shared: The argument; 0 where they are not held in the model's dtype.

    Raises:
        ConfigError: The checkpoint stores them in a format that cannot be read.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        count: int,
        chosen: int,
        *,
        projections: tuple[str, str, str],
        activation: Gate,
        stacked: Stacked | None = None,
        shared: int = 0,
        context: LayerContext,
    ) -> None:
        super().__init__()
        self._context, self._activation = context, activation
        inner = context.parallel.shard_expert("moe_intermediate_size", intermediate_size)
        self.places = ExpertPlaces(count, context.parallel, context.ops)
        outer = whole(hidden_size)
        self.projections = gate, up, down = projections
        made: Callable[..., WideMatrices | StoredMatrices] = expert_matrices
        if stacked is not None and not context.linear.stores(self.name(0, gate)):
            made = StackedMatrices if stacked == "transposed" else StackedRows
        self._gate_up = made((gate, up), self.places, inner, outer, context, shared)
        self._down = made((down,), self.places, outer, inner, context, shared)
        self.shared = min(self._gate_up.room, self._down.room)
        for each in (self._gate_up, self._down):
            if not self.shared and isinstance(each, WideMatrices):
                each.give_up_room()  # both have as many experts
        self._chosen = chosen + self.shared
        self._sum: PlacedSum

    def name(self, expert: int, projection: str) -> str:
        """The checkpoint's name of an expert's projection."""
        return f"{self._context.prefix}.{expert}.{projection}"

    def slots(self) -> WeightSlots:
        return self._gate_up.slots() | self._down.slots()

    def join(self, gate_up: Tensor, down: Tensor) -> None:
        """Copies a shared expert, [2 * shared * intermediate_size, hidden_size] and [hidden_size, shared * intermediate_size], to
        the others; before :meth:`finish`."""
        assert isinstance(self._gate_up, WideMatrices) and isinstance(self._down, WideMatrices)
        shape = self.shared, -1, down.shape[0]
        for at, part in enumerate(gate_up.chunk(2)):
            self._gate_up.others()[:, at].copy_(part.view(shape))
        self._down.others()[:, 0].copy_(down.t().view(shape).transpose(1, 2))

    @property
    def renewal(self) -> Renewal:
        return renewal_of(self.slots(), self._context)

    @property
    def weight_name(self) -> str:
        return self._context.prefix

    def finish(self) -> None:
        self.ready()

    def ready(self, wrap: Callable[[ExpertStack], ExpertStack] = lambda stack: stack) -> None:
        """Prepares the sum; ``wrap`` wraps the matrices before the activation and those after it."""
        stacks = wrap(self._gate_up.stack()), wrap(self._down.stack())
        self._sum = PlacedSum(self.places, *stacks, self._activation, self._chosen, self._context, self.shared)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor, add_to: Tensor | None = None) -> Tensor:
        """[T, hidden_size] and what the router chose, [T, k] each -> [T, hidden_size], this rank's part of the sum; of one rank
        it may be added to ``add_to`` in place, which is returned then."""
        return self._sum(x, ids, weights, add_to)

    def move(self, moves: Sequence[ExpertMove]) -> None:
        """Moves experts between ranks; all ranks make the same call."""
        self._sum.move(moves)


# The matrices that a layer's experts have alike: read in the model's dtype into their places, and quantised there if
# wanted.


class WideMatrices:
    """A matrix of each expert, of one or more of a checkpoint's projections whose outputs lie side by side.

    Args:
        parts: The checkpoint's names of the projections.
        places: Which experts are here.
        rows: Which outputs of each projection are computed here.
        columns: Which inputs are multiplied here.
        context: Where and how they are built; its prefix is that of the experts.
        room: For how many additional experts to make room; other code fills it.

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
        """Gives up the room for other experts; call it before anything is read."""
        self._weight = self._weight.new_empty(len(self._weight) - self.room, *self._weight.shape[1:])
        self.room = 0

    def others(self) -> Tensor:
        """The room for others, [room, parts, rows, columns]."""
        return self._weight[len(self._weight) - self.room :]

    def slots(self) -> WeightSlots:
        """The tensors that a checkpoint fills, each a view: one for each projection of each expert. Experts of other ranks are
        not read."""
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
    """The same for checkpoints that hold each projection of all experts as one transposed tensor: [E, K, N]."""

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


class StackedRows(WideMatrices):
    """The same for checkpoints that hold it as [E, N, K]."""

    def slots(self) -> WeightSlots:
        if not self._weight.numel():
            return {}
        spans = self._own, self._rows, self._columns
        return {
            f"{self._context.prefix}.{part}": WeightSlot(self._weight[: self._own.size, at], spans=spans)
            for at, part in enumerate(self._parts)
        }


def expert_matrices(
    parts: Sequence[str], places: ExpertPlaces, rows: Span, columns: Span, context: LayerContext, room: int = 0
) -> WideMatrices | StoredMatrices:
    """The matrices in the checkpoint's format of the first expert, if that is a quantised one, else in the model's dtype with
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
    """Prepares matrices in the model's dtype for multiplication: quantises them, expert by expert, if that is wanted and
    possible.

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
    """The part of an expert's matrix on this rank, as a linear layer."""
    return LinearShape((Part(context.prefix, whole(rows)),), whole(columns))


def stack_of(stored: StoredStack, context: LayerContext) -> ExpertStack:
    """Quantised matrices of experts: for a GPU's grouped product as they are, else a separate product for each expert."""
    if context.ops.groups_experts:
        return stored
    products = [context.ops.grouped(stored.weight(expert)) for expert in range(stored.experts)]
    return StackOfProducts(products, stored.outputs, stored.bias)


# The matrices that a layer's experts have alike, in a format of linear layers, as the checkpoint stores each.


class StoredMatrices:
    """A matrix of each expert, of one or more projections whose outputs lie side by side: a linear layer each.

    Args:
        parts: What the checkpoint calls the projections.
        places: Which experts are here.
        rows: Which outputs of each projection are computed here.
        columns: Which inputs are multiplied here.
        context: Where and how they are built; its prefix is that of the experts.

    Attributes:
        room: Of others none.

    Raises:
        ConfigError: The checkpoint stores an expert in another format than the first.
    """

    room = 0

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
                raise context.linear.unlike(shape, expert_shape(0, parts, rows, columns, context))
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
        """The matrices, once the slots are filled: one tensor for a GPU's grouped product, else a separate product for each
        expert.

        Raises:
            ConfigError: The grouped product does not take this format.
        """
        self._slots = {}  # what was read is freed, expert by expert
        methods, self._methods = self._methods, {}
        taken = ((name, methods.pop(name)) for name in list(methods))
        return stack_of_methods(taken, self._places.size, self._outputs, self._context)


def renewal_of(slots: WeightSlots, context: LayerContext) -> Renewal:
    """How experts' weights change while the model serves: where they stay in their slots as they were read, they are copied.
    Graphs hold addresses of what :class:`PlacedSum` makes for them."""
    wide = slots and all(slot.target.dtype == context.dtype for slot in slots.values())
    return "copy" if wide and not context.ops.captures else "refuse"


def expert_shape(expert: int, parts: Sequence[str], rows: Span, columns: Span, context: LayerContext) -> LinearShape:
    """An expert's projections as a linear layer."""
    return LinearShape(tuple(Part(f"{context.prefix}.{expert}.{part}", rows) for part in parts), columns)


def stack_of_methods(
    methods: Iterable[tuple[str, LinearMethod]],
    slots: int,
    outputs: int,
    context: LayerContext,
    bias: Tensor | None = None,
) -> ExpertStack:
    """Experts' matrices, each a linear layer's, by their names.

    Args:
        methods: With their slots filled; each may be freed once the next is asked for.
        slots: Experts that there is room for where they can move.
        outputs: Of each.
        context: Where and how they are built.
        bias: Of each expert in its slot, [E, N], or None.

    Raises:
        ConfigError: A GPU's product of all experts does not take this format; names an expert.
    """
    if not context.ops.groups_experts:
        products = []
        for _, method in methods:
            method.finish()
            products.append(method.apply)
        return StackOfProducts(products, outputs, bias)
    at = ""

    def weights() -> Iterator[GroupedWeight]:
        nonlocal at
        for name, method in methods:
            at = name
            weight = method.grouped()
            if weight is None:
                raise ValueError("its projections are laid out in different ways, or have a bias")
            yield weight

    try:
        return stacked(weights(), slots, bias)
    except ValueError as error:
        raise ConfigError(f"{at}: a GPU's product of experts does not take this: {error}") from error


# The experts of a layer where checkpoints hold all of them in one tensor, in the model's dtype or in MXFP4: gpt-oss.


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
        activation: The function that joins gate and up.
        context: Where and how it is built.

    Attributes:
        places: Where they are.

    Raises:
        ConfigError: The experts cannot be split over this many ranks.
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

    @property
    def renewal(self) -> Renewal:
        return renewal_of(self.slots(), self._context)

    @property
    def weight_name(self) -> str:
        return self._context.prefix

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
