"""What kernels of states compute, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sapwood_kernels.state.contracts import GateOrder


def gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    groups: int,
    order: GateOrder,
    dtype: torch.dtype,
    *,
    sigmoid: bool = False,
) -> Tensor:
    """RMSNorm of each of the groups of a row, and ``silu(gate)`` or ``sigmoid(gate)``, in float32: [T, D] of ``dtype``.

    Args:
        x: [T, D]; rows contiguous.
        gate: [T, D]; rows contiguous.
        weight: float32 [D], or [D / groups], which all groups share; None: there is no norm.
        eps: Added to the mean square.
        groups: Into how many equal parts a row is divided.
        order: Which comes first.
        dtype: The result's.
        sigmoid: Whether the gate is ``sigmoid(gate)``.
    """
    factor = gate.float().sigmoid() if sigmoid else F.silu(gate.float())
    x = x.float()
    if order == "gate first":
        x = x * factor
    if weight is not None:
        parts = x.view(len(x), groups, -1)
        normed = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + eps)
        x = (normed * weight.view(-1, parts.shape[2])).view_as(x)
    if order == "norm first":
        x = x * factor
    return x.to(dtype)
