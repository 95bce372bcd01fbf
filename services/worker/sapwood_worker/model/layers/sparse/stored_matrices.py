"""The matrices that a layer's experts have alike, in a format of linear layers, as the checkpoint stores each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from sapwood_common.errors import ConfigError
from sapwood_kernels.experts.stack import ExpertStack, StackOfProducts, stacked
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
        """The matrices, once the slots are filled: for a GPU's grouped product in one tensor, else by a product of each.

        Raises:
            ConfigError: The grouped product does not take this format.
        """
        self._slots = {}  # what was read is freed, expert by expert
        methods, self._methods = self._methods, {}
        taken = ((name, methods.pop(name)) for name in list(methods))
        return stack_of_methods(taken, self._places.size, self._outputs, self._context)


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
