"""The layer of latent attention (MLA): the cache keeps one compressed vector of a token, shared by all heads."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from torch import Tensor

from sapwood_kernels.attention.latent.heads import LatentHeads
from sapwood_kernels.ops.contracts import StoreAbsorbed, StoreLatent
from sapwood_worker.model.attention.backend import AttentionLayer, AttentionPlan
from sapwood_worker.model.layers.layer import Layer, LayerContext
from sapwood_worker.model.layers.linear import ColumnLinear, RowLinear
from sapwood_worker.model.layers.norm import RMSNorm
from sapwood_worker.model.layers.rotary import Angles
from sapwood_worker.model.quantization.linear_method import LinearShape, Part, Renewal
from sapwood_worker.model.weight_slot import Span, WeightSlots, whole

_EPS = 1e-6
"""The epsilon of latent attention's own norms, independent of the model's other norms."""


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Latent attention (MLA), by DeepSeek's names; ``head_dim`` of the model is then ``qk_rope_head_dim``.

    Attributes:
        kv_lora_rank: Size of the latent vector that the cache keeps of a token.
        qk_nope_head_dim: Numbers of a query or key head that are not rotated.
        qk_rope_head_dim: Numbers of a query or key head that are rotated; all heads of a key share them, and the cache keeps them
            too.
        v_head_dim: Size of a value head.
        q_lora_rank: Size of the vector that queries are made of; None: they are made of the layer's input.
        rope_interleave: Whether pairs of rotated numbers lie side by side in the checkpoint, not half a head apart.
    """

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    rope_interleave: bool = True

    def __post_init__(self) -> None:
        """Raises ValueError if values are wider than keys, because a GPU pads values to the size of keys."""
        if self.v_head_dim > self.query_dim:
            raise ValueError(f"v_head_dim {self.v_head_dim} above a key's {self.query_dim} numbers is not supported")

    @property
    def query_dim(self) -> int:
        """Size of a query head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cached_dim(self) -> int:
        """Numbers that a token leaves in the cache, for each layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim


class LatentAttention(Layer):
    """Latent attention over the paged cache; heads are split over the ranks, and each rank caches every token's vector.

    Args:
        hidden_size: Width in and out.
        num_heads: Query heads.
        latent: The sizes.
        constants: The layer's constants for the backend.
        context: Where and how it is built.

    Attributes:
        ranks: Sums what ranks have of the output; None: there is one.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        latent: LatentConfig,
        constants: AttentionLayer,
        context: LayerContext,
    ) -> None:
        super().__init__()
        self._latent = latent
        self._context = context
        self._constants = constants

        def heads(width: int) -> Span:
            return context.parallel.shard("num_attention_heads", num_heads, width)

        self._heads = heads(1).size
        queries = heads(latent.query_dim)
        rank, shared = latent.kv_lora_rank, whole(latent.cached_dim)
        self.query_up: ColumnLinear | None = None
        if latent.q_lora_rank is None:
            self.down = ColumnLinear(hidden_size, {"q_proj": queries, "kv_a_proj_with_mqa": shared}, False, context)
        else:
            parts = {"q_a_proj": whole(latent.q_lora_rank), "kv_a_proj_with_mqa": shared}
            self.down = ColumnLinear(hidden_size, parts, False, context)
            self.query_norm = RMSNorm(latent.q_lora_rank, _EPS, context.inside("q_a_layernorm"))
            self.query_up = ColumnLinear(latent.q_lora_rank, {"q_b_proj": queries}, False, context)
        self.latent_norm = RMSNorm(rank, _EPS, context.inside("kv_a_layernorm"))
        up = Part(context.inside("kv_b_proj").prefix, heads(latent.qk_nope_head_dim + latent.v_head_dim))
        self._store: StoreLatent
        self._store_absorbed: StoreAbsorbed | None = None
        self._up = context.linear.dense(LinearShape((up,), whole(rank)))
        self.output = RowLinear(heads(latent.v_head_dim), "o_proj", hidden_size, False, context)
        self.ranks = self.output.ranks

    def slots(self) -> WeightSlots:
        return self._up.slots()

    def finish(self) -> None:
        up = self._up.weight.view(self._heads, -1, self._latent.kv_lora_rank)
        ops, nope = self._context.ops, self._latent.qk_nope_head_dim
        self._constants = replace(self._constants, latent=LatentHeads(up, nope, ops.latent_products(up, nope)))
        norm, interleaved = self.latent_norm, self._latent.rope_interleave
        self._store = ops.store_latent(norm.weight, norm.eps, self._context.dtype, interleaved=interleaved)
        self._store_absorbed = ops.store_absorbed(norm.weight, norm.eps, up, interleaved=interleaved)

    @property
    def renewal(self) -> Renewal:
        return "refuse" if self._context.ops.captures else "copy"  # what is made of them has another address

    def depends_on(self) -> Collection[str]:
        return self.slots().keys() | self.latent_norm.slots().keys()

    def forward(
        self,
        hidden: Tensor,
        norm: RMSNorm,
        angles: Angles,
        plan: AttentionPlan,
        residual: Tensor | None = None,
    ) -> Tensor:
        """[T, hidden_size], which it norms first -> [T, hidden_size], added to ``residual`` in place if there is one.

        Writes this step's vectors to the cache.
        """
        down: Tensor = self.down(hidden, norm)
        query, vectors = down[:, : -self._latent.cached_dim], down[:, -self._latent.cached_dim :]
        if self.query_up is not None:
            query = self.query_up(query, self.query_norm)
        query = query.view(len(query), self._heads, -1)
        step = vectors, query, angles.cos, angles.sin, plan.destination(self._constants)
        both = self._store_absorbed
        if both is not None and plan.absorbed is not None and len(query) <= both.most:
            found = plan.absorbed.attend_absorbed(self._constants, both.store(*step)).flatten(1)
        else:
            found = plan.attend_cached(self._constants, self._store(*step))
        result: Tensor = self.output(found, None, residual)
        return result
