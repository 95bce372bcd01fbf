"""The experts of a layer, stacked."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from sapwood_kernels.experts.stack import ExpertStack
from sapwood_kernels.ops.contracts import Gate
from sapwood_worker.model.layers.context import LayerContext
from sapwood_worker.model.layers.layer import Layer
from sapwood_worker.model.layers.sparse.matrices import StackedMatrices, WideMatrices, expert_matrices
from sapwood_worker.model.layers.sparse.placed_sum import PlacedSum
from sapwood_worker.model.layers.sparse.places import ExpertPlaces
from sapwood_worker.model.weight_slot import WeightSlots, whole
from sapwood_worker.records.experts import ExpertMove


class Experts(Layer):
    """The weighted sum of each token's experts, gated MLPs without biases. Ranks have a part of each, or some of them whole.

    The matrices of all experts are two tensors, and each tensor of the checkpoint is read into its place there.

    Args:
        hidden_size: Width in and out.
        intermediate_size: Width of an expert's gate and up.
        count: How many experts there are.
        chosen: How many a token goes to.
        projections: What checkpoints call an expert's gate, up and down.
        activation: The gate's activation.
        stacked: Whether checkpoints hold each projection of all experts as one tensor, transposed, unless one has them apart: in
            few bits.
        shared: As how many experts more, to which every token goes, a shared one may be computed among them (:meth:`join`).
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
        stacked: bool = False,
        shared: int = 0,
        context: LayerContext,
    ) -> None:
        super().__init__()
        self._context, self._activation = context, activation
        inner = context.parallel.shard_expert("moe_intermediate_size", intermediate_size)
        self.places = ExpertPlaces(count, context.parallel, context.ops)
        outer = whole(hidden_size)
        self.projections = gate, up, down = projections
        made = StackedMatrices if stacked and not context.linear.stores(self.name(0, gate)) else expert_matrices
        self._gate_up = made((gate, up), self.places, inner, outer, context, shared)
        self._down = made((down,), self.places, outer, inner, context, shared)
        self.shared = min(self._gate_up.room, self._down.room)
        for each in (self._gate_up, self._down):
            if not self.shared and isinstance(each, WideMatrices):
                each.give_up_room()  # both have as many experts
        self._chosen = chosen + self.shared
        self._sum: PlacedSum

    def name(self, expert: int, projection: str) -> str:
        """What a checkpoint calls an expert's projection."""
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

    def finish(self) -> None:
        self.ready()

    def ready(self, wrap: Callable[[ExpertStack], ExpertStack] = lambda stack: stack) -> None:
        """Readies the sum, with something around the matrices before the activation, and around those after it."""
        stacks = wrap(self._gate_up.stack()), wrap(self._down.stack())
        self._sum = PlacedSum(self.places, *stacks, self._activation, self._chosen, self._context, self.shared)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor, add_to: Tensor | None = None) -> Tensor:
        """[T, hidden_size] and what the router chose, [T, k] each -> [T, hidden_size], this rank's part of the sum; of one rank
        it may be added to ``add_to`` in place, which is returned then."""
        return self._sum(x, ids, weights, add_to)

    def move(self, moves: Sequence[ExpertMove]) -> None:
        """Moves experts between ranks; all ranks make the same call."""
        self._sum.move(moves)
