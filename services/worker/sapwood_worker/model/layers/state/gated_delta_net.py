"""The gated delta net of Qwen3-Next: each head's state maps keys to values, decays, and is corrected where it is wrong.

For keys k, values v, decays g <= 0 (logarithms) and strengths b of a head, with the state S before token i:

    u = b (v - (e^g S)' k),   S <- e^g S + k u',   out = S' q

Algorithm: in chunks of tokens, all u of a chunk solve one triangular system, since u_i depends on the state before the chunk and
on u_j for j < i. So a chunk is a few products of matrices (the UT transform). One token is a chunk of length one.
O(T (chunk + head size)) products of vectors for each head. Everything is float32.

Source: Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from sapwood_kernels.state.contracts import DeltaShape, DeltaWeights, Slots, StateSteps
from sapwood_worker.model.attention.backend import AttentionPlan
from sapwood_worker.model.layers.layer import LayerContext
from sapwood_worker.model.layers.linear import ColumnLinear, RowLinear
from sapwood_worker.model.layers.norm import AnyNorm
from sapwood_worker.model.layers.rotary import Angles
from sapwood_worker.model.layers.state.state_layer import StateLayer, convolve, decays
from sapwood_worker.model.pools.state_pool import StatePlan
from sapwood_worker.model.weight_slot import Span, WeightSlot, WeightSlots, whole

CHUNK = 64
"""Tokens that are computed together."""
_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class GatedDeltaConfig:
    """Implements :class:`sapwood_worker.model.layers.state.state_layer.StateConfig`.

    Attributes:
        key_heads: Heads of queries and keys.
        value_heads: Heads of values, a multiple of that; each group of them shares a key head.
        key_dim: Elements of a key.
        value_dim: Elements of a value.
        taps: Inputs that an output of the convolution before depends on.
        eps: Added to the mean square in the norm behind.
        joined: Whether checkpoints hold the projections head by head in ``in_proj_qkvz`` and ``in_proj_ba``; else they are
            ``in_proj_qkv``, ``in_proj_z``, ``in_proj_b`` and ``in_proj_a``.
        name: What checkpoints call the layer.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    eps: float
    joined: bool = True
    name: str = "linear_attn"

    @property
    def heads(self) -> int:
        return self.key_heads

    @property
    def shared(self) -> int:
        """Value heads of a key head."""
        return self.value_heads // self.key_heads

    @property
    def numbers(self) -> int:
        channels = 2 * self.key_dim + self.shared * self.value_dim
        return self.key_heads * (channels * (self.taps - 1) + self.shared * self.key_dim * self.value_dim)

    @property
    def convolved(self) -> dict[str, int]:
        """Queries, keys and values: their channels in checkpoints, in order."""
        keys = self.key_heads * self.key_dim
        return {"q": keys, "k": keys, "v": self.value_heads * self.value_dim}

    def build(self, hidden_size: int, index: int, context: LayerContext) -> StateLayer:
        return GatedDeltaNet(self, hidden_size, index, context)


class GatedDeltaNet(StateLayer):
    """Projections, a short convolution, the delta rule, and a gated norm of each head. Heads are split over the ranks.

    Args:
        config: Its sizes.
        hidden_size: Width in and out.
        index: The layer's.
        context: Where and how it is built.
    """

    def __init__(self, config: GatedDeltaConfig, hidden_size: int, index: int, context: LayerContext) -> None:
        super().__init__()
        self._config, self._index, self._prefix = config, index, context.prefix
        shared, keys, values = config.shared, config.key_dim, config.shared * config.value_dim

        def heads(width: int) -> Span:
            """This rank's key heads, of so many numbers each."""
            return context.parallel.shard("linear_num_key_heads", config.key_heads, width)

        self._heads = heads(1).size
        if config.joined:
            inputs = {"in_proj_qkvz": heads(2 * (keys + values))}
            factors = {"in_proj_ba": heads(2 * shared)}
        else:
            inputs = {"in_proj_q": heads(keys), "in_proj_k": heads(keys), "in_proj_v": heads(values)}
            inputs |= {"in_proj_z": heads(values)}
            factors = {"in_proj_b": heads(shared), "in_proj_a": heads(shared)}
        self.inputs = ColumnLinear(hidden_size, inputs, False, context)
        self.factors = ColumnLinear(hidden_size, factors, False, context)
        self.output = RowLinear(heads(values), "out_proj", hidden_size, False, context)
        self.ranks = self.output.ranks
        self._spans = {"q": heads(keys), "k": heads(keys), "v": heads(values)}
        self._of_heads = heads(shared)

        def empty(*sizes: int) -> Tensor:
            return torch.empty(*sizes, dtype=torch.float32, device=context.device)

        self._convolution = empty(sum(span.size for span in self._spans.values()), 1, config.taps)
        self._decay, self._bias = empty(self._of_heads.size), empty(self._of_heads.size)
        self._norm = empty(config.value_dim)
        self._ops = context.ops
        self._weights = DeltaWeights(self._convolution[:, 0], self._decay, self._bias, self._norm)
        self._shape = DeltaShape(self._heads, shared, keys, config.value_dim, config.taps, config.joined, config.eps)

    def slots(self) -> WeightSlots:
        split = torch.split(self._convolution, [span.size for span in self._spans.values()])
        slots = {
            f"{self._prefix}.conv_{name}.weight": WeightSlot(part, spans=(span, whole(1), whole(self._config.taps)))
            for (name, span), part in zip(self._spans.items(), split, strict=True)
        }
        slots[f"{self._prefix}.A_log"] = WeightSlot(self._decay, spans=(self._of_heads,))
        slots[f"{self._prefix}.dt_bias"] = WeightSlot(self._bias, spans=(self._of_heads,))
        slots[f"{self._prefix}.norm.weight"] = WeightSlot(self._norm)
        return slots

    def forward(
        self,
        hidden: Tensor,
        norm: AnyNorm | None,
        angles: Angles,
        plan: AttentionPlan,
        residual: Tensor | None = None,
    ) -> Tensor:
        assert plan.states is not None
        normed = hidden if norm is None else norm(hidden)
        inputs, factors = self.inputs(normed, None), self.factors(normed, None)
        out = plan.states.step(self._index, self._ops, partial(self._step, inputs, factors))
        if out is None:
            out = self._mixed(inputs, factors, plan.states)
        result: Tensor = self.output(out, None, residual)
        return result

    def _step(self, inputs: Tensor, factors: Tensor, steps: StateSteps, slots: Slots) -> Tensor:
        return steps.delta(inputs, factors, slots, self._weights, self._shape)

    def _mixed(self, joined: Tensor, factors: Tensor, states: StatePlan) -> Tensor:
        """The output before the last projection of what the first ones give: [T, value heads * value_dim]."""
        qkv, z, b, a = self._split(joined, factors)
        beta = b.float().sigmoid()
        decay = -self._decay.exp() * F.softplus(a.float() + self._bias)
        width = self._heads * self._config.shared * self._config.value_dim
        inputs = torch.cat((qkv.float(), beta, decay), 1)
        mixed = states.scan(self._index, inputs, width, self._scan)
        heads = self._heads * self._config.shared
        result: Tensor = self._ops.gated_norm(mixed, z, self._norm, self._config.eps, heads, "norm first", joined.dtype)
        return result

    def _split(self, joined: Tensor, factors: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The convolution's inputs [T, channels], the gates [T, value heads * value_dim], strengths and decays' inputs
        [T, value heads]."""
        config, heads = self._config, self._heads
        keys, values = config.key_dim, config.shared * config.value_dim
        if config.joined:
            q, k, v, z = torch.split(joined.view(len(joined), heads, -1), [keys, keys, values, values], 2)
            b, a = factors.view(len(joined), heads, -1).chunk(2, 2)
            return torch.cat([each.flatten(1) for each in (q, k, v)], 1), z.flatten(1), b.flatten(1), a.flatten(1)
        qkv, z = torch.split(joined, [heads * (2 * keys + values), heads * values], 1)
        b, a = factors.chunk(2, 1)
        return qkv, z, b, a

    def _scan(self, inputs: Tensor, states: Tensor, slots: Tensor) -> Tensor:
        config, heads, shared = self._config, self._heads, self._config.shared
        size, count, _ = inputs.shape
        channels = len(self._convolution)
        qkv, beta, decay = torch.split(inputs, [channels, heads * shared, heads * shared], 2)
        known = states.index_select(0, slots)
        kept = channels * (config.taps - 1)
        before, memory = torch.split(known, [kept, known.shape[1] - kept], 1)
        convolved, last = convolve(qkv, before.view(size, channels, -1), self._convolution[:, 0], None)
        q, k, v = torch.split(F.silu(convolved), [span.size for span in self._spans.values()], 2)
        q, k = (_normalised(each.view(size, count, heads, -1)).repeat_interleave(shared, 2) for each in (q, k))
        v = v.view(size, count, heads * shared, -1)
        memory = memory.view(size, heads * shared, config.key_dim, config.value_dim)
        out, memory = delta_rule(q * config.key_dim**-0.5, k, v, decay, beta, memory)
        states.index_copy_(0, slots, torch.cat((last.flatten(1), memory.flatten(1)), 1))
        return out.flatten(2)


def _normalised(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The gated delta rule, in chunks.

    Args:
        q, k: float32 [B, T, H, K].
        v: float32 [B, T, H, V].
        decay: float32 [B, T, H], at most 0: the logarithm of each step's factor.
        beta: float32 [B, T, H].
        state: float32 [B, H, K, V]: before the first token.

    Returns:
        The outputs [B, T, H, V], and the state after the last token.
    """
    outs = []
    q, k, v, decay, beta = (each.transpose(1, 2) for each in (q, k, v, decay, beta))
    for start in range(0, q.shape[2], CHUNK):
        at = slice(start, start + CHUNK)
        qs, ks, vs, strength = q[:, :, at], k[:, :, at], v[:, :, at], beta[:, :, at, None]
        total, left = decays(decay[:, :, at])
        since = total[..., None]
        system = (strength * ks) @ ks.transpose(2, 3) * left
        wrong = strength * (vs - since * (ks @ state))
        u = torch.linalg.solve_triangular(system, wrong, upper=False, unitriangular=True)
        outs.append(since * (qs @ state) + (qs @ ks.transpose(2, 3) * left) @ u)
        state = since[:, :, -1:] * state + (left[:, :, -1, :, None] * ks).transpose(2, 3) @ u
    return torch.cat(outs, 2).transpose(1, 2), state
