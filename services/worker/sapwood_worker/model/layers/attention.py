"""The attention layer: projections, head norms, rotation, and the backend's attention between them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from sapwood_worker.model.attention.backend import AttentionLayer, AttentionPlan
from sapwood_worker.model.layers.layer import Layer
from sapwood_worker.model.layers.linear import Linear, Quantization
from sapwood_worker.model.layers.norm import RMSNorm
from sapwood_worker.model.layers.rotary import apply_rope
from sapwood_worker.model.layers.weight_slot import WeightSlot, WeightSlots


class QKNorm(Layer):
    """A norm on each query head and one on each key head, computed as one.

    Args:
        num_heads: Query heads.
        num_kv_heads: Key heads.
        head_dim: Elements a head.
        eps: Added to the mean square.
        device: Where the weights lie.
    """

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, eps: float, device: torch.device) -> None:
        super().__init__()
        self._num_heads = num_heads
        self._stored = nn.Parameter(torch.empty(2, head_dim, device=device), requires_grad=False)
        self.norm = RMSNorm((num_heads + num_kv_heads, head_dim), eps, device)

    @property
    def head_weights(self) -> tuple[Tensor, Tensor]:
        """The weights of a query head's norm and of a key head's, float32 [head_dim] each."""
        return self._stored[0], self._stored[1]

    def weights(self, prefix: str) -> WeightSlots:
        """The slots of its tensors under ``prefix``."""
        return {
            f"{prefix}.q_norm.weight": WeightSlot(self._stored[0], norm=True),
            f"{prefix}.k_norm.weight": WeightSlot(self._stored[1], norm=True),
        }

    def prepare(self, dtype: torch.dtype) -> None:
        """Readies the weights for use; called once when they are loaded."""
        self.norm.weight[: self._num_heads] = self._stored[0]
        self.norm.weight[self._num_heads :] = self._stored[1]
        self.norm.prepare(dtype)

    def forward(self, query_key: Tensor) -> Tensor:
        """Norms each head: [T, num_heads + num_kv_heads, head_dim] -> the same shape."""
        result: Tensor = self.norm(query_key)
        return result


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
        device: Where the weights lie.
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
        device: torch.device,
    ) -> None:
        super().__init__()
        self._rotated = num_heads + num_kv_heads
        self._num_heads = num_heads
        self._shape = (-1, num_heads + 2 * num_kv_heads, head_dim)
        self._constants = constants
        parts = {"q_proj": num_heads * head_dim, "k_proj": num_kv_heads * head_dim, "v_proj": num_kv_heads * head_dim}
        self.qkv = Linear(hidden_size, parts, qkv_bias, dtype, device)
        self.output = Linear(num_heads * head_dim, {"o_proj": hidden_size}, output_bias, dtype, device)
        self.qk_norm = qk_norm
        self._fused: Callable[..., Tensor] | None = None

    def weights(self, prefix: str) -> WeightSlots:
        """The slots of its tensors under ``prefix``."""
        norms = self.qk_norm.weights(prefix) if self.qk_norm is not None else {}
        return self.qkv.weights(prefix) | self.output.weights(prefix) | norms

    def prepare(self, dtype: torch.dtype, quantization: Quantization = "none") -> None:
        """Readies the weights for use; called once when they are loaded."""
        self.qkv.prepare(quantization)
        self.output.prepare(quantization)
        if self.qk_norm is not None:
            self.qk_norm.prepare(dtype)
        if self.qkv.weight.device.type == "cuda":
            from sapwood_kernels.triton_qkv import norm_rope_store  # only CUDA builds of torch have triton

            norm = self.qk_norm
            self._fused = partial(
                norm_rope_store,
                num_heads=self._num_heads,
                norm_weights=None if norm is None else norm.head_weights,
                eps=0.0 if norm is None else norm.norm.eps,
            )

    def forward(self, hidden: Tensor, norm: RMSNorm, angles: tuple[Tensor, Tensor], plan: AttentionPlan) -> Tensor:
        """[T, hidden_size], which it norms first -> [T, hidden_size]; writes this step's keys and values to the cache."""
        result: Tensor = self.output(self._context(hidden, norm, angles, plan))
        return result

    def add_to(self, hidden: Tensor, norm: RMSNorm, angles: tuple[Tensor, Tensor], plan: AttentionPlan) -> None:
        """Adds the output for ``hidden`` to it in place."""
        self.output.add_to(hidden, self._context(hidden, norm, angles, plan))

    def _context(self, hidden: Tensor, norm: RMSNorm, angles: tuple[Tensor, Tensor], plan: AttentionPlan) -> Tensor:
        if self._fused is not None:
            to = plan.destination(self._constants)
            cos, sin = angles
            qkv = self.qkv.normed(hidden, norm)
            query = self._fused(qkv, cos[:, 0], sin[:, 0], to.keys, to.values, to.slots, scales=to.scales)
            return plan.attend_cached(self._constants, query)
        heads = self.qkv.normed(hidden, norm).view(self._shape)
        query_key, value = heads[:, : self._rotated], heads[:, self._rotated :]
        if self.qk_norm is not None:
            query_key = self.qk_norm(query_key)
        query_key = apply_rope(query_key, *angles)
        query, key = query_key[:, : self._num_heads], query_key[:, self._num_heads :]
        return plan.attend(self._constants, query, key, value)
