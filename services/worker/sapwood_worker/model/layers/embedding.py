"""Token embedding and output head."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sapwood_kernels.ops.device import DeviceOps, OneRow
from sapwood_worker.model.layers.layer import Layer
from sapwood_worker.model.layers.norm import RMSNorm
from sapwood_worker.model.layers.weight_slot import WeightSlot, WeightSlots


class Embedding(Layer):
    """Rows of a table, scaled.

    Args:
        vocab_size: Rows.
        hidden_size: Width of a row.
        scale: Factor on the output, rounded to ``dtype`` first (as Gemma does).
        dtype: The table's dtype.
        ops: The operations of the device, where the table lies.
    """

    def __init__(self, vocab_size: int, hidden_size: int, scale: float, dtype: torch.dtype, ops: DeviceOps) -> None:
        super().__init__()
        empty = torch.empty(vocab_size, hidden_size, dtype=dtype, device=ops.device)
        self.weight = nn.Parameter(empty, requires_grad=False)
        self._scale = torch.tensor(scale, dtype=dtype).item()

    def weights(self, prefix: str) -> WeightSlots:
        """The slots of its tensors under ``prefix``."""
        return {f"{prefix}.weight": WeightSlot(self.weight)}

    def forward(self, token_ids: Tensor) -> Tensor:
        """int64 [T] -> [T, hidden_size]."""
        rows = F.embedding(token_ids, self.weight)
        return rows if self._scale == 1.0 else rows * self._scale


class LMHead(Layer):
    """Logits from hidden states.

    Args:
        weight: [vocab_size, hidden_size]; the embedding's parameter if the two are tied.
        tied: Whether it is the embedding's; checkpoints then have no tensor for it.
        softcap: Logits become ``softcap * tanh(logits / softcap)``.
        ops: The operations of the weight's device.
    """

    def __init__(self, weight: nn.Parameter, *, tied: bool, softcap: float | None, ops: DeviceOps) -> None:
        super().__init__()
        self.weight = weight
        self._tied = tied
        self._softcap = softcap
        self._ops = ops
        self._packed: Callable[[Tensor], Tensor] | None = None
        self._one_row: OneRow | None = None

    def weights(self, prefix: str) -> WeightSlots:
        """The slots of its tensors under ``prefix``."""
        return {} if self._tied else {f"{prefix}.weight": WeightSlot(self.weight)}

    def prepare(self) -> None:
        """Readies the weights for use; called once when they are loaded."""
        self._packed = self._ops.packed(self.weight, None)
        self._one_row = self._ops.one_row(self.weight)

    def forward(self, hidden: Tensor, norm: RMSNorm) -> Tensor:
        """[R, hidden_size], which it norms first -> [R, vocab_size], float32 or the model's dtype."""
        if self._one_row is not None and hidden.shape[0] == 1:
            logits = self._one_row(hidden, norm=(norm.weight, norm.eps), dtype=torch.float32)
        elif self._packed is not None:
            logits = self._packed(norm(hidden))
        else:
            logits = F.linear(norm(hidden), self.weight)
        if self._softcap is not None:
            logits = logits.float().div_(self._softcap).tanh_().mul_(self._softcap)
        return logits
