"""The sum of a token's experts in plain torch: the definition of faster versions, and what a CPU computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sapwood_kernels.experts.stack import ExpertStack


def expert_sum(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: ExpertStack,
    down: ExpertStack,
    activate: Callable[[Tensor], Tensor],
) -> Tensor:
    """The weighted sum of ``down(activate(gate_up(x)))`` over each token's experts.

    Tokens are sorted by their experts. An expert's matrices are read once for all its tokens, those of experts without any are
    not read. The order of a sum does not depend on what else is in the batch.

    Args:
        x: [T, K].
        ids: int64 [T, k]: each token's experts, of E; E stands for one that is not here and adds nothing.
        weights: float32 [T, k].
        gate_up: [2N, K] of each expert.
        down: [K, N] of each expert.
        activate: [*, 2N] -> [*, N].

    Returns:
        [T, K].
    """
    if len(ids) == 1:
        return _of_one_token(x, ids, weights, gate_up, down, activate)
    chosen = ids.flatten()
    *counts, absent = torch.bincount(chosen, minlength=gate_up.experts + 1).tolist()
    order = chosen.argsort(stable=True)
    tokens = order // ids.shape[1]
    parts = (x.new_zeros if absent else x.new_empty)(len(chosen), down.outputs)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            rows = slice(start, start + count)
            inner = activate(gate_up.product(expert, x[tokens[rows]]))
            parts[order[rows]] = down.product(expert, inner)
            start += count
    return torch.bmm(weights.to(x.dtype).unsqueeze(1), parts.view(*ids.shape, down.outputs)).squeeze(1)


def _of_one_token(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: ExpertStack,
    down: ExpertStack,
    activate: Callable[[Tensor], Tensor],
) -> Tensor:
    """:func:`expert_sum` where there is nothing to sort."""
    parts = [
        down.product(expert, activate(gate_up.product(expert, x)))
        if expert < gate_up.experts
        else x.new_zeros(1, down.outputs)
        for expert in ids[0].tolist()
    ]
    return weights.to(x.dtype) @ torch.cat(parts)


# The activation of gpt-oss's experts.


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """``(up + 1) * gate * sigmoid(alpha * gate)`` of clamped inputs that take turns: gate, up, gate, up.

    Attributes:
        alpha: Gain of the sigmoid.
        limit: The gate is at most this, up is between minus this and this.

    Source: OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025, section 2.2.
    """

    alpha: float = 1.702
    limit: float = 7.0

    def __call__(self, gate_up: Tensor) -> Tensor:
        """[T, 2N] -> [T, N]."""
        gate, up = gate_up[:, ::2].clamp(max=self.limit), gate_up[:, 1::2].clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(gate * self.alpha)
