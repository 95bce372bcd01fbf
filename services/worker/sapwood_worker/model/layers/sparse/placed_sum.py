"""The sum of a token's experts where ranks have some of them each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sapwood_common.errors import ConfigError
from sapwood_kernels.experts.activation import ClampedGate
from sapwood_kernels.experts.stack import ExpertStack
from sapwood_kernels.ops.contracts import Gate
from sapwood_worker.model.layers.context import LayerContext
from sapwood_worker.model.layers.sparse.places import ExpertPlaces
from sapwood_worker.records.experts import ExpertMove


class PlacedSum:
    """This rank's part of the weighted sum of each token's experts, of which those here may change between steps.

    On a CPU, where experts move, the ranks first hand each other what every expert made of a token, so that it is summed in the
    same order wherever the experts are. On a GPU each sums what its own made, as where they do not move: the other way would
    exchange as many times more as a token has experts; likewise where rows are sent to the ranks of their experts only.

    Args:
        places: Where the experts are.
        gate_up: The matrices before the gated activation, slot by slot.
        down: Those after it.
        activation: The activation.
        chosen: How many experts a token goes to.
        context: Where and how it is built.
        shared: To how many of them, the last ones, all tokens go.

    Raises:
        ConfigError: They are held in a way in which they cannot move, but are to.
    """

    def __init__(
        self,
        places: ExpertPlaces,
        gate_up: ExpertStack,
        down: ExpertStack,
        activation: Gate | ClampedGate,
        chosen: int,
        context: LayerContext,
        shared: int = 0,
    ) -> None:
        self._places = places
        self._tensors = (*gate_up.tensors, *down.tensors)
        if places.movable and not (gate_up.tensors and down.tensors):
            raise ConfigError(
                f"--expert-parallel redundant: {context.prefix}: on this device experts in few bits stay where they are; "
                "--stored-weights widen widens float8 and GGUF's types"
            )
        self._sum = context.ops.expert_sum(gate_up, down, activation, chosen, shared)
        self._group = context.parallel.ep

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, add_to: Tensor | None = None) -> Tensor:
        """[T, hidden_size] and what the router chose, [T, k] each -> [T, hidden_size], to be summed over the ranks; of one rank
        it may be added to ``add_to`` in place, which is returned then."""
        local = self._places.local(ids)
        if not self._places.exchanges:
            return self._sum(x, local, weights, add_to=add_to)
        each = self._sum(x.repeat_interleave(ids.shape[1], 0), local.view(-1, 1), torch.ones_like(weights).view(-1, 1))
        parts = self._group.all_reduce(each).view(*ids.shape, -1)
        result = torch.bmm(weights.to(x.dtype).unsqueeze(1), parts).squeeze(1)
        return result if self._group.rank == 0 else result.zero_()

    def move(self, moves: Sequence[ExpertMove]) -> None:
        """Moves experts of this layer; all ranks make the same call."""
        self._places.move(moves, self._tensors)
