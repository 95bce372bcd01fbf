"""All-to-all for experts over GPUs that reach each other's memory. Only CUDA imports it: it needs Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from sapwood_kernels.experts.payload import RowShape
from sapwood_kernels.experts.triton_dispatch import PeerRows
from sapwood_kernels.ranks.triton_meeting import WAIT_FOREVER
from sapwood_worker.model.distributed.group import Group
from sapwood_worker.model.distributed.peer_all_reduce import PeerMemory

_TRIAL_TRIES = 1 << 23
"""How often a trial polls for signals: some seconds, because another rank may still compile the kernel."""


class PeerWays:
    """Implements :class:`~sapwood_worker.model.distributed.expert_exchange.RowWays`; made by all ranks together.

    Args:
        group: The ranks, on one host.
        shape: The rows.
        most_rows: Rows of a rank at a time, at most.
        device: This rank's GPU, with its index.

    Until :meth:`wait_forever` is called, a call gives up with wrong results if signals do not arrive.

    Raises:
        RuntimeError: The ranks do not reach each other's memory.
    """

    def __init__(self, group: Group, shape: RowShape, most_rows: int, device: torch.device) -> None:
        self.shape, self.most_rows = shape, most_rows
        memory = PeerMemory(group, PeerRows.region_bytes(shape, most_rows, group.size), device)
        self._rows = PeerRows(memory.addresses, group.rank, shape, most_rows, device)
        self._tries = _TRIAL_TRIES
        self.moved = self._rows.moved

    def wait_forever(self) -> None:
        """Ends the trial: from now on calls wait for signals without limit."""
        self._tries = WAIT_FOREVER

    def dispatch(
        self, x: Tensor, ids: Tensor, weights: Tensor, holders: Tensor, rows: int, counts: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._rows.dispatch(x, ids, weights, holders, rows, counts, self._tries)

    def combine(self, part: Tensor, holders: Tensor, rows: int) -> Tensor:
        return self._rows.combine(part, holders, rows, self._tries)
