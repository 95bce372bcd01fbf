"""The attention layer: projections, head norms, rotation, and the backend's attention between them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sapwood_kernels.ops.device import DeviceOps, StoreHeads
from sapwood_worker.model.attention.backend import AttentionLayer, AttentionPlan
from sapwood_worker.model.layers.layer import Layer
from sapwood_worker.model.layers.linear import Linear, Quantization
from sapwood_worker.model.layers.norm import RMSNorm
from sapwood_worker.model.layers.weight_slot import WeightSlot, WeightSlots


class QKNorm(Layer):
    """The weights of a norm on each query head and of one on each key head.

    Args:
        head_dim: Elements a head.
        eps: Added to the mean square.
        ops: The operations of the device, where the weights lie.
    """

    def __init__(self, head_dim: int, eps: float, ops: DeviceOps) -> None:
        super().__init__()
        self._stored = nn.Parameter(torch.empty(2, head_dim, device=ops.device), requires_grad=False)
        self._eps = eps

    @property
    def norm(self) -> tuple[Tensor, Tensor, float]:
        """The weights of a query head's norm and of a key head's, float32 [head_dim] each, and what is added to mean squares."""
        return self._stored[0], self._stored[1], self._eps

    def weights(self, prefix: str) -> WeightSlots:
        """The slots of its tensors under ``prefix``."""
        return {
            f"{prefix}.q_norm.weight": WeightSlot(self._stored[0], norm=True),
            f"{prefix}.k_norm.weight": WeightSlot(self._stored[1], norm=True),
        }


class Attention(Layer):
    """Grouped-query attention over the paged cache.

    Args:
        hidden_size: Width in and out.
        num_heads: Query heads.
        num_kv_heads: Key/value heads.
        head_dim: Elements a head.
        constants: The layer's constants for the backend.
        qk_norm: Norms on query and key heads, or None.
        qkv_bias: Whether the input projections have biases.
        output_bias: Whether the output projection has a bias.
        dtype: The dtype of weights and activations.
        ops: The operations of the device, where the weights lie.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        constants: AttentionLayer,
        qk_norm: QKNorm | None,
        qkv_bias: bool,
        output_bias: bool,
        dtype: torch.dtype,
        ops: DeviceOps,
    ) -> None:
        super().__init__()
        self._ops = ops
        self._heads = num_heads, num_kv_heads
        self._constants = constants
        parts = {"q_proj": num_heads * head_dim, "k_proj": num_kv_heads * head_dim, "v_proj": num_kv_heads * head_dim}
        self.qkv = Linear(hidden_size, parts, qkv_bias, dtype, ops)
        self.output = Linear(num_heads * head_dim, {"o_proj": hidden_size}, output_bias, dtype, ops)
        self.qk_norm = qk_norm
        self._store: StoreHeads

    def weights(self, prefix: str) -> WeightSlots:
        """The slots of its tensors under ``prefix``."""
        norms = self.qk_norm.weights(prefix) if self.qk_norm is not None else {}
        return self.qkv.weights(prefix) | self.output.weights(prefix) | norms

    def prepare(self, dtype: torch.dtype, quantization: Quantization = "none") -> None:
        """Readies the weights for use; called once when they are loaded."""
        self.qkv.prepare(quantization)
        self.output.prepare(quantization)
        norm = None if self.qk_norm is None else self.qk_norm.norm
        self._store = self._ops.store_heads(*self._heads, norm, dtype)

    def forward(self, hidden: Tensor, norm: RMSNorm, angles: tuple[Tensor, Tensor], plan: AttentionPlan) -> Tensor:
        """[T, hidden_size], which it norms first -> [T, hidden_size]; writes this step's keys and values to the cache."""
        result: Tensor = self.output(self._context(hidden, norm, angles, plan))
        return result

    def add_to(self, hidden: Tensor, norm: RMSNorm, angles: tuple[Tensor, Tensor], plan: AttentionPlan) -> None:
        """Adds the output for ``hidden`` to it in place."""
        self.output.add_to(hidden, self._context(hidden, norm, angles, plan))

    def _context(self, hidden: Tensor, norm: RMSNorm, angles: tuple[Tensor, Tensor], plan: AttentionPlan) -> Tensor:
        to = plan.destination(self._constants)
        qkv = self.qkv.normed(hidden, norm)
        query = self._store(qkv, *angles, to.keys, to.values, to.slots, to.scales)
        return plan.attend_cached(self._constants, query)
