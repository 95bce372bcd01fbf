"""Triton: an expert's gated activation inside of other kernels, in float32."""

from __future__ import annotations

from typing import Literal

import triton
import triton.language as tl

from sapwood_kernels.experts.reference import ClampedGate

Gate = Literal["silu", "gelu_tanh"] | ClampedGate


@triton.jit
def gated(gate, up, alpha, limit, GATE: tl.constexpr):
    """The activation of a gate, times the gated value; GATE: 0: SiLU, 1: GELU, 2: ``ClampedGate``."""
    if GATE == 2:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        active = gate * tl.sigmoid(alpha * gate)
    elif GATE == 1:
        z = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        active = gate * tl.sigmoid(2.0 * z)  # 0.5 (1 + tanh z) = sigmoid(2 z)
    else:
        active = gate * tl.sigmoid(gate)
    return active * up


def kind_of(gate: Gate) -> tuple[int, float, float]:
    """GATE, alpha and limit, as :func:`gated` takes them."""
    if isinstance(gate, ClampedGate):
        return 2, gate.alpha, gate.limit
    return int(gate == "gelu_tanh"), 0.0, 0.0
