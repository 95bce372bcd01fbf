"""Linear layers, several of a checkpoint's projections fused into one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sapwood_kernels import cpu
from sapwood_worker.layers.layer import Layer
from sapwood_worker.layers.norm import RMSNorm
from sapwood_worker.layers.weight_slot import WeightSlot, WeightSlots

Gate = Literal["silu", "gelu_tanh"]

# Wider rows are faster in cuBLAS, which splits them: 31 against 33 us for 4096 x 14336 on an H200.
_WIDEST_ROW = 8192


class Linear(Layer):
    """``x @ weight.T + bias`` where the outputs of several projections of the same input lie side by side.

    Args:
        in_features: Width of the input.
        parts: Checkpoint name of each projection (``q_proj``) -> its output width, in output order.
        bias: Whether each has a bias.
        dtype: Of weights and activations.
        device: Where the weights lie.
    """

    def __init__(
        self, in_features: int, parts: Mapping[str, int], bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self._parts = dict(parts)
        total = sum(parts.values())
        empty = torch.empty(total, in_features, dtype=dtype, device=device)
        self.weight = nn.Parameter(empty, requires_grad=False)
        empty_bias = torch.empty(total, dtype=dtype, device=device)
        self.bias = nn.Parameter(empty_bias, requires_grad=False) if bias else None
        self._packed: cpu.PackedLinear | None = None
        self._one_row: Callable[..., Tensor] | None = None

    def weights(self, prefix: str) -> WeightSlots:
        """The slots of its tensors, each projection under ``prefix.name``."""
        slots: WeightSlots = {}
        start = 0
        for name, size in self._parts.items():
            slots[f"{prefix}.{name}.weight"] = WeightSlot(self.weight[start : start + size])
            if self.bias is not None:
                slots[f"{prefix}.{name}.bias"] = WeightSlot(self.bias[start : start + size])
            start += size
        return slots

    def prepare(self) -> None:
        """Called once when weights are loaded."""
        if cpu.can_pack(self.weight):
            self._packed = cpu.PackedLinear(self.weight, self.bias)
        elif self.weight.device.type == "cuda" and self.weight.shape[1] <= _WIDEST_ROW:
            from sapwood_kernels.triton_gemv import gemv  # triton is there only with CUDA builds of torch

            self._one_row = gemv

    def forward(self, x: Tensor) -> Tensor:
        """[T, in_features] -> [T, sum of the parts]."""
        if self._packed is not None:
            return self._packed(x)
        if self._one_row is not None and x.shape[0] == 1:
            return self._one_row(x, self.weight, bias=self.bias)
        return F.linear(x, self.weight, self.bias)

    def normed(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """``self(norm(x))``; one kernel for a single row on a GPU."""
        if self._one_row is not None and x.shape[0] == 1:
            return self._one_row(x, self.weight, bias=self.bias, norm=(norm.weight, norm.eps))
        result: Tensor = self(norm(x))
        return result

    def gated(self, x: Tensor, norm: RMSNorm, gate: Gate, activate: Callable[[Tensor], Tensor]) -> Tensor:
        """``activate(self(norm(x)))`` for an ``activate`` that is the gated activation ``gate``; one kernel as above."""
        if self._one_row is not None and x.shape[0] == 1:
            return self._one_row(x, self.weight, bias=self.bias, norm=(norm.weight, norm.eps), gate=gate)
        return activate(self.normed(x, norm))

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """Adds the layer's output to ``residual`` [T, sum of the parts] in place: in the matrix product itself where it can."""
        if self._one_row is not None and x.shape[0] == 1:
            self._one_row(x, self.weight, bias=self.bias, add_to=residual)
        elif self._packed is not None or self.bias is not None:
            residual += self(x)
        else:
            residual.addmm_(x, self.weight.t())
