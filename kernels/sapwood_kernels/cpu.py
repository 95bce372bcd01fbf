"""The same operations as ``reference.py``, written for few and cheap torch calls on a CPU in float32.

A decode step of a small model runs hundreds of operations of a few microseconds each, so the count of torch calls decides.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

# Up to this many rows MKL's matrix-vector code on plain weights beats oneDNN's blocked kernel, whose set-up costs 50 us a
# call; beyond it plain float32 weights lose quickly (2.4 times slower at 8 rows, measured on AVX-512).
_PLAIN_ROWS = 2


class RmsNorm:
    """Computes :func:`reference.rms_norm` for a fixed float32 weight, in four torch calls.

    ``sqrt(mean(x^2) + eps) = hypot(|x|, sqrt(N eps)) / sqrt(N)``; the ``sqrt(N)`` is folded into the weight.

    Args:
        weight: [N] or [..., N]; copied.
        eps: Added to the mean square.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        width = weight.shape[-1]
        self._weight = weight.detach() * math.sqrt(width)
        self._floor = torch.tensor(math.sqrt(width * eps), dtype=weight.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """Norms x: [..., N] -> [..., N]."""
        length = torch.linalg.vector_norm(x, 2, -1, True)
        return torch.div(x, torch.hypot(length, self._floor)).mul_(self._weight)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Computes :func:`reference.rope`, with ``cos`` and ``sin`` [T, 1, D]."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Computes :func:`reference.silu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """Computes :func:`reference.gelu_tanh_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def can_pack(weight: Tensor) -> bool:
    """Whether :class:`PackedLinear` serves this weight, which is on a CPU: float32, torch built with oneDNN."""
    return weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


class PackedLinear:
    """``x @ weight.T + bias`` with the weight also held in oneDNN's blocked layout.

    It holds the weight twice, which takes memory: for one or two rows the plain layout is faster.

    Args:
        weight: float32 [N, K] on a CPU; shared, not copied.
        bias: float32 [N].
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight.default(weight.detach(), 8)
        self._linear = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        """Multiplies x: [T, K] -> [T, N]."""
        if x.shape[0] <= _PLAIN_ROWS:
            return F.linear(x, self._weight, self._bias)
        result: Tensor = self._linear(x, self._packed, self._bias, "none", [], "")
        return result
