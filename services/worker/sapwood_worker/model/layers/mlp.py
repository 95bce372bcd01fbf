"""The gated MLP."""

from __future__ import annotations

import torch
from torch import Tensor

from sapwood_kernels.ops.device import DeviceOps, Gate
from sapwood_worker.model.layers.layer import Layer
from sapwood_worker.model.layers.linear import Input, Linear, Quantization
from sapwood_worker.model.layers.norm import RMSNorm
from sapwood_worker.model.layers.weight_slot import WeightSlots


class GatedMLP(Layer):
    """``down(activation(gate(x)) * up(x))``.

    Args:
        hidden_size: Width in and out.
        intermediate_size: Width of gate and up.
        gelu: Whether the activation is gelu (tanh form); else it is silu.
        bias: Whether the projections have biases.
        dtype: The dtype of weights and activations.
        ops: The operations of the device, where the weights lie.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        gelu: bool,
        bias: bool,
        dtype: torch.dtype,
        ops: DeviceOps,
    ) -> None:
        super().__init__()
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up = Linear(hidden_size, parts, bias, dtype, ops)
        self.down = Linear(intermediate_size, {"down_proj": hidden_size}, bias, dtype, ops)
        self._gate: Gate = "gelu_tanh" if gelu else "silu"
        self._activate = ops.gated(self._gate)

    def weights(self, prefix: str) -> WeightSlots:
        """The slots of its tensors under ``prefix``."""
        return self.gate_up.weights(prefix) | self.down.weights(prefix)

    def prepare(self, quantization: Quantization = "none") -> None:
        """Readies the weights for use; called once when they are loaded."""
        self.gate_up.prepare(quantization)
        self.down.prepare(quantization)

    def forward(self, hidden: Tensor, norm: RMSNorm) -> Tensor:
        """[T, hidden_size], which it norms first -> [T, hidden_size]."""
        result: Tensor = self.down(self._inner(hidden, norm))
        return result

    def add_to(self, hidden: Tensor, norm: RMSNorm) -> None:
        """Adds the output for ``hidden`` to it in place."""
        self.down.add_to(hidden, self._inner(hidden, norm))

    def _inner(self, hidden: Tensor, norm: RMSNorm) -> Input:
        if self.down.float8 is not None and hidden.shape[0] > 1:
            return self.down.float8.gate(self.gate_up.normed(hidden, norm), self._gate)
        return self.gate_up.gated(hidden, norm, self._gate, self._activate)
