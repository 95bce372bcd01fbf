"""Where the experts of a layer are: which rank computes a token's experts, and how experts move between ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sapwood_common.errors import ConfigError
from sapwood_kernels.experts.reference import ClampedGate
from sapwood_kernels.experts.stack import ExpertStack
from sapwood_kernels.ops.contracts import Gate
from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.model.layers.layer import LayerContext
from sapwood_worker.model.weight_slot import Span
from sapwood_worker.records.expert_load import ExpertMove, home_slots, moved


class ExpertPlaces:
    """The slots of a layer's experts on all ranks, and which of them are here.

    Every rank has the same view. If an expert is in several slots, the tokens of a step use these slots in turn.

    Args:
        experts: How many there are.
        parallel: The ranks.
        ops: The operations of the device where ids are.

    Attributes:
        own: The experts that the checkpoint fills here; they are in the first slots.
        size: Slots of a rank.
        slots: The expert in each slot, rank after rank; -1: none.
        exchanges: Whether ranks exchange the outputs of experts; :class:`PlacedSum` explains when.
    """

    def __init__(self, experts: int, parallel: Parallel, ops: DeviceOps) -> None:
        self.own: Span = parallel.own_experts(experts)
        self.size = self.own.size + parallel.spare_slots(experts)
        self.slots = home_slots(experts, parallel.ep.size, parallel.redundant_experts)
        self._group, self._ops = parallel.ep, ops
        self._experts = experts
        # For each expert, and a last one that stands for none: its slots here (`size` for a slot elsewhere), and their number.
        self._local = torch.full((experts + 1, parallel.ep.size), self.size, dtype=torch.int64, device=ops.device)
        self._copies = torch.ones(experts + 1, dtype=torch.int64, device=ops.device)
        self._ranks = torch.full_like(self._local, parallel.ep.size)
        self.exchanges = self.movable and not ops.groups_experts and parallel.expert_exchange is None
        if parallel.ep.size > 1:
            self._fill()

    @property
    def movable(self) -> bool:
        """Whether experts can move."""
        return self.size > self.own.size

    def local(self, ids: Tensor) -> Tensor:
        """Integers [T, k], experts, or their number for none -> slots of this rank, or their number for one elsewhere."""
        if not self.movable and self.own.size == self.own.total:
            return ids
        return self._ops.turns(self._local, self._copies, ids, 0)

    def holders(self, ids: Tensor, first: int) -> Tensor:
        """Integers [T, k], as for :meth:`local` -> the ranks that have the slots; the number of ranks for none.

        Args:
            ids: The experts of rows; the first row has the number ``first`` among all ranks' rows.
            first: Rows before them.
        """
        return self._ops.turns(self._ranks, self._copies, ids, first)

    def move(self, moves: Sequence[ExpertMove], tensors: Sequence[Tensor]) -> None:
        """Copies experts between slots; all ranks make the same call.

        Args:
            moves: This layer's moves, which happen at once.
            tensors: All that makes up this rank's experts, slot by slot.
        """
        rank, came = self._group.rank, []
        for move in moves:
            target, source = move.slot // self.size, move.source // self.size
            if move.source < 0 or rank not in (target, source):
                continue
            for tensor in tensors:
                # As bytes: of small floats not every backend has an exchange.
                held = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
                if source == rank:
                    sent = held[move.source % self.size].clone()
                    if target == rank:
                        came.append((held[move.slot % self.size], sent))
                    else:
                        self._group.send(sent, target)
                else:
                    place = held[move.slot % self.size]
                    came.append((place, self._group.receive(torch.empty_like(place), source)))
        for place, content in came:
            place.copy_(content)
        self.slots = moved(self.slots, list(moves))
        self._fill()

    def _fill(self) -> None:
        """Overwrites the tables in place, because CUDA graphs read them. The host does not wait for what is queued."""
        local = np.full(self._local.shape, self.size, np.int64)
        ranks = np.full(self._local.shape, self._group.size, np.int64)
        copies = np.zeros(self._experts + 1, np.int64)
        copies[-1] = 1
        for slot, expert in enumerate(self.slots):
            if expert >= 0:
                if slot // self.size == self._group.rank:
                    local[expert, copies[expert]] = slot % self.size
                ranks[expert, copies[expert]] = slot // self.size
                copies[expert] += 1
        self._ops.fill(self._local, local)
        self._ops.fill(self._ranks, ranks)
        self._ops.fill(self._copies, copies)


# The sum of a token's experts where ranks have some of them each.


class PlacedSum:
    """This rank's part of the weighted sum of each token's experts. The experts on this rank may change between steps.

    On a CPU with moving experts, the ranks first exchange every expert's output for a token, so that the outputs are summed in
    the same order wherever the experts are. On a GPU, and where rows are sent only to the ranks of their experts, each rank sums
        the outputs of its own experts: exchanging all outputs would send as many times more bytes as a token has experts.

    Args:
        places: Where the experts are.
        gate_up: The matrices before the gated activation, slot by slot.
        down: Those after it.
        activation: The activation.
        chosen: How many experts a token goes to.
        context: Where and how it is built.
        shared: To how many of them, the last ones, all tokens go.

    Raises:
        ConfigError: The experts should move, but their storage format does not allow it.
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
