"""What stages of a pipeline give each other: hidden states go to the next one, and those of the last one back to all.

Sends have a queue of the device's beside the one that computes, and a buffer each. So a stage computes on while what it has sent
waits for its receiver, which may still compute an earlier step. The rest is exchanged on the queue that computes: nothing there
goes on without it, and a receive that waited beside would take multiprocessors from the computation meanwhile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.distributed.group import Group


class StageLink:
    """A stage's ways to the others.

    Args:
        stages: The stages; this rank's place among them is its stage.
        width: Numbers of a token's hidden state.
        dtype: Their dtype.
        ops: The device's operations.

    Attributes:
        first, last: Whether no stage comes before, or after, this one.
        alone: Both: there is nothing to exchange.
    """

    def __init__(self, stages: Group, width: int, dtype: torch.dtype, ops: DeviceOps) -> None:
        self.first, self.last = stages.rank == 0, stages.rank == stages.size - 1
        self.alone = self.first and self.last
        self._stages, self._width, self._dtype, self._device = stages, width, dtype, ops.device
        if not self.last:
            self._sending = ops.side_queue()

    def receive(self, tokens: int) -> Tensor:
        """[tokens, width]: what the stage before sends next."""
        return self._stages.receive(self.empty(tokens), self._stages.rank - 1)

    def send(self, hidden: Tensor) -> None:
        """Sends [T, width] to the next stage; it may be overwritten at once."""
        own = hidden.clone()
        with self._sending.behind(own):
            self._stages.send(own, self._stages.rank + 1)

    def spread(self, hidden: Tensor) -> Tensor:
        """Overwrites [R, width] with what the last stage has there; called by all stages. Returns it."""
        return self._stages.broadcast(hidden, self._stages.size - 1)

    def empty(self, tokens: int) -> Tensor:
        """[tokens, width], undefined."""
        return torch.empty(tokens, self._width, dtype=self._dtype, device=self._device)
