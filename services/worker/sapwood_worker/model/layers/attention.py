"""The attention layer: projections, head norms, rotation, and the backend's attention between them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from sapwood_kernels.ops.contracts import StoreHeads
from sapwood_worker.model.attention.backend import AttentionLayer, AttentionPlan
from sapwood_worker.model.layers.layer import Layer, LayerContext
from sapwood_worker.model.layers.linear import ColumnLinear, RowLinear
from sapwood_worker.model.layers.norm import AnyNorm, AnyQKNorm, QKNorm, RotatedNorm
from sapwood_worker.model.layers.rotary import Angles, RopeConfig
from sapwood_worker.model.weight_slot import WeightSlot, WeightSlots


class Attention(Layer):
    """Grouped-query attention over the paged cache, heads split over the ranks.

    Args:
        hidden_size: Width out, and in.
        input_size: The input width, if it differs from ``hidden_size``.
        num_heads: Query heads.
        num_kv_heads: Key/value heads.
        head_dim: Elements a head.
        constants: The layer's constants for the backend.
        qk_norm: Norms of queries and keys, or None.
        qkv_bias: Whether the input projections have biases.
        output_bias: Whether the output projection has a bias.
        sinks: Whether each query head has a sink (gpt-oss): ``sinks`` in the checkpoint.
        gated: Whether the output is multiplied by the sigmoid of a gate: ``q_proj`` has it behind each query.
        clip: Queries, keys and values lie between this and its negative; None: they are as they are computed.
        rope: Its rotary embedding; None: heads are not turned.
        context: Where and how it is built.

    Attributes:
        ranks: Sums what ranks have of the output; None: there is one.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        constants: AttentionLayer,
        qk_norm: AnyQKNorm | None,
        qkv_bias: bool,
        output_bias: bool,
        sinks: bool = False,
        gated: bool = False,
        clip: float | None = None,
        input_size: int | None = None,
        rope: RopeConfig | None = None,
        context: LayerContext,
    ) -> None:
        super().__init__()
        self._context = context
        queries = context.parallel.shard("num_attention_heads", num_heads, head_dim)
        keys = context.parallel.shard("num_key_value_heads", num_kv_heads, head_dim, copies=True)
        self._pairs = None if rope is None else rope.pairs(head_dim)
        self._heads = queries.size // head_dim, keys.size // head_dim
        self._gated, self._clip = gated, clip
        both = context.parallel.shard("num_attention_heads", num_heads, 2 * head_dim) if gated else queries
        inputs = {"q_proj": both, "k_proj": keys, "v_proj": keys}
        self.qkv = ColumnLinear(input_size or hidden_size, inputs, qkv_bias, context)
        self.output = RowLinear(queries, "o_proj", hidden_size, output_bias, context)
        self.ranks = self.output.ranks
        self.qk_norm = qk_norm
        self._sinks: WeightSlots = {}
        if sinks:
            mine = context.parallel.shard("num_attention_heads", num_heads)
            empty = torch.empty(mine.size, dtype=torch.float32, device=context.device)
            self._sinks[f"{context.prefix}.sinks"] = WeightSlot(empty, spans=(mine,))
            constants = replace(constants, sinks=empty)
        self._constants = constants
        self._store: StoreHeads

    def slots(self) -> WeightSlots:
        return self._sinks

    def finish(self) -> None:
        # That of single heads is computed in the same pass as the rotation.
        norm = self.qk_norm.norm if isinstance(self.qk_norm, QKNorm) else None
        self._store = self._context.ops.store_heads(*self._heads, norm, self._context.dtype, self._pairs)

    def depends_on(self) -> Collection[str]:
        return self._sinks.keys() | (set() if self.qk_norm is None else self.qk_norm.slots().keys())

    def forward(
        self,
        hidden: Tensor,
        norm: AnyNorm | None,
        angles: Angles,
        plan: AttentionPlan,
        residual: Tensor | None = None,
    ) -> Tensor:
        """[T, hidden_size], normed first by ``norm`` -> [T, hidden_size], added to ``residual`` in place if there is one.

        Writes this step's keys and values to the cache.
        """
        to = plan.destination(self._constants)
        qkv, gate = self.qkv(hidden, norm), None
        if self._gated:
            qkv, gate = self._without_gate(qkv)
        if self.qk_norm is not None and not isinstance(self.qk_norm, QKNorm):
            qkv = self.qk_norm(qkv)
        if self._clip is not None:
            qkv = qkv.clamp(-self._clip, self._clip)
        query = self._store(qkv, angles.cos, angles.sin, to)
        if angles.growth is not None:
            query *= angles.growth
        if isinstance(self.qk_norm, RotatedNorm):
            query *= self.qk_norm.factor
        context = plan.attend_cached(self._constants, query)
        if gate is not None:
            context = context * gate.sigmoid()
        result: Tensor = self.output(context, None, residual)
        return result

    def _without_gate(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """What the projection gives with gates -> queries, keys and values; the gates, [T, queries]."""
        heads, keys = self._heads
        dim = qkv.shape[1] // (2 * heads + 2 * keys)
        both, rest = torch.split(qkv, [2 * heads * dim, 2 * keys * dim], 1)
        query, gate = both.view(len(qkv), heads, 2, dim).unbind(2)
        return torch.cat((query.flatten(1), rest), 1), gate.flatten(1)
