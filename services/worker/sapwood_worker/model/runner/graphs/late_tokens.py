"""What a chain of decodes has drafted, which the host need not know to have it checked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sapwood_kernels.ops.device import DeviceOps
from sapwood_kernels.ops.host_copies import Moment
from sapwood_worker.records.step import LATE, IntArray


class DraftedTokens:
    """Implements :class:`sapwood_worker.records.step.LateTokens`; on their way to the host from construction on.

    Args:
        steps: int64 [B] of each step: the tokens; less than 0 for one that could not be told.
        ops: The operations of their device.
        begun: When the device began to make them.

    Attributes:
        begun: The argument.
        share: The part of their time that :meth:`seconds` tells: less than 1 if fewer tokens are used than were made.
        tokens: int64 [K * B] on the device, step after step; 0 for a token that could not be told.
    """

    def __init__(self, steps: Sequence[Tensor], ops: DeviceOps, begun: Moment) -> None:
        self.tokens = torch.cat(list(steps)).clamp(min=0)
        self._ops = ops
        self.share = 1.0
        self.begun, self._ended = begun, ops.moment()
        self._copies = ops.to_host([self.tokens])

    def wait(self) -> IntArray:
        found: IntArray = self._copies.wait()[0].numpy()
        return found

    def seconds(self) -> float:
        return self._ended.seconds_since(self.begun) * self.share

    def rows_of(self, token_ids: IntArray) -> tuple[Tensor, Tensor]:
        """The late tokens that a step's tokens stand for: their places in the step and their ids, both int64 [N] on the
        device."""
        rows = np.flatnonzero(token_ids <= LATE)
        places, which = self._ops.to_device(np.stack((rows, LATE - token_ids[rows])))
        return places, self.tokens.index_select(0, which)
