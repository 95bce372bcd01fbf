"""Linear layers, several of a checkpoint's projections fused into one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sapwood_kernels.float8_linear import Float8Linear, Quantised, Scaling, can_quantise
from sapwood_kernels.ops.device import GROUP, DeviceOps, Gate, OneRow
from sapwood_worker.model.layers.layer import Layer
from sapwood_worker.model.layers.norm import RMSNorm
from sapwood_worker.model.layers.weight_slot import WeightSlot, WeightSlots

Quantization = Literal["none", "fp8", "fp8_block", "fp8_tensor"]
"""How linear layers compute: in the model's dtype, or in float8 scaled by row, by block or by tensor."""
Input = Tensor | Quantised


class Linear(Layer):
    """``x @ weight.T + bias`` where the outputs of several projections of the same input lie side by side.

    Args:
        in_features: Width of the input.
        parts: Checkpoint name of each projection (``q_proj``) -> its output width, in output order.
        bias: Whether each projection has a bias.
        dtype: The dtype of weights and activations.
        ops: The operations of the device, where the weights lie.
    """

    def __init__(
        self, in_features: int, parts: Mapping[str, int], bias: bool, dtype: torch.dtype, ops: DeviceOps
    ) -> None:
        super().__init__()
        self._parts = dict(parts)
        total = sum(parts.values())
        empty = torch.empty(total, in_features, dtype=dtype, device=ops.device)
        self.weight = nn.Parameter(empty, requires_grad=False)
        empty_bias = torch.empty(total, dtype=dtype, device=ops.device)
        self.bias = nn.Parameter(empty_bias, requires_grad=False) if bias else None
        self._ops = ops
        self._packed: Callable[[Tensor], Tensor] | None = None
        self._one_row: OneRow | None = None
        self.float8: Float8Linear | None = None
        """The layer in float8, if :meth:`prepare` was told to quantise it."""

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

    def prepare(self, quantization: Quantization = "none") -> None:
        """Called once when weights are loaded; replaces them by quantised ones."""
        if quantization != "none" and can_quantise(self.weight):
            scaling: Scaling = "tensor" if quantization == "fp8_tensor" else "row"
            if quantization == "fp8_block" and all(size % GROUP == 0 for size in self._parts.values()):
                scaling = "block"
            self.float8 = Float8Linear(self.weight, self.bias, self._ops, scaling=scaling)
            self.weight = nn.Parameter(self.float8.weight, requires_grad=False)
        else:
            self._packed = self._ops.packed(self.weight, self.bias)
        scales = None if self.float8 is None else self.float8.row_scales
        self._one_row = self._ops.one_row(self.weight, self.bias, scales)

    def forward(self, x: Input) -> Tensor:
        """[T, in_features] -> [T, sum of the parts]."""
        if isinstance(x, Tensor):
            if self._one_row is not None and x.shape[0] == 1:
                return self._one_row(x)
            if self.float8 is None:
                return F.linear(x, self.weight, self.bias) if self._packed is None else self._packed(x)
            x = self.float8.quantise(x)
        assert self.float8 is not None
        return self.float8(x)

    def normed(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """``self(norm(x))``; one kernel for a single row on a GPU."""
        if self._one_row is not None and x.shape[0] == 1:
            return self._one_row(x, norm=(norm.weight, norm.eps))
        if self.float8 is not None:
            return self.float8(self.float8.norm(x, norm.weight, norm.eps))
        return self.forward(norm(x))

    def gated(self, x: Tensor, norm: RMSNorm, gate: Gate, activate: Callable[[Tensor], Tensor]) -> Tensor:
        """``activate(self(norm(x)))`` for an ``activate`` that is the gated activation ``gate``; one kernel as above."""
        if self._one_row is not None and x.shape[0] == 1:
            return self._one_row(x, norm=(norm.weight, norm.eps), gate=gate)
        return activate(self.normed(x, norm))

    def add_to(self, residual: Tensor, x: Input) -> None:
        """Adds the layer's output to ``residual`` [T, sum of the parts] in place: in the matrix product itself where it can."""
        if self._one_row is not None and residual.shape[0] == 1 and isinstance(x, Tensor):
            self._one_row(x, add_to=residual)
        elif isinstance(x, Quantised) or self.float8 is not None or self._packed is not None or self.bias is not None:
            residual += self.forward(x)
        else:
            residual.addmm_(x, self.weight.t())
