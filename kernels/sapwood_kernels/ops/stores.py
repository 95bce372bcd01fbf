"""All between projections and attention, put together from a device's operations where no kernel does it in one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sapwood_kernels import reference
from sapwood_kernels.kv_destination import KVDestination
from sapwood_kernels.ops.contracts import StoreHeads, StoreLatent

Rope = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``reference.rope`` of heads [T, H, D], with cos and sin [T, 1, D]."""


def rope_of(partners: Tensor) -> Rope:
    """The rotation of numbers that are not half of D apart.

    Args:
        partners: int64 [D], as ``reference.rope`` takes it.
    """
    return lambda x, cos, sin: reference.rope(x, cos[:, 0], sin[:, 0], partners)


def heads_store(num_heads: int, num_kv_heads: int, norm: Callable[[Tensor], Tensor] | None, rope: Rope) -> StoreHeads:
    """What norms, rotates and stores the heads of a step.

    Args:
        num_heads: H.
        num_kv_heads: K.
        norm: Of query and key heads, [T, H + K, D]; None: there is none.
        rope: Rotates them.
    """
    rotated = num_heads + num_kv_heads

    def store(qkv: Tensor, cos: Tensor, sin: Tensor, to: KVDestination) -> Tensor:
        heads = qkv.view(len(qkv), rotated + num_kv_heads, -1)
        query_key = heads[:, :rotated] if norm is None else norm(heads[:, :rotated])
        query_key = rope(query_key, cos, sin)
        query, key = query_key[:, :num_heads], query_key[:, num_heads:]
        to.store(key, heads[:, rotated:])
        return query

    return store


def latent_store(rank: int, norm: Callable[[Tensor], Tensor], rope: Rope, *, interleaved: bool) -> StoreLatent:
    """What norms, rotates and stores the vectors of a step.

    Args:
        rank: Numbers of a vector's latent part: R.
        norm: Of these, [T, R].
        rope: Rotates what comes after them, and the ends of queries.
        interleaved: Whether the two numbers that are turned together stand side by side, not half of E apart.
    """

    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if interleaved:
            x = torch.cat((x[..., 0::2], x[..., 1::2]), 2)
        return rope(x, cos, sin)

    def store(vectors: Tensor, query: Tensor, cos: Tensor, sin: Tensor, to: KVDestination) -> Tensor:
        rotary = vectors.shape[1] - rank
        end = turned(vectors[:, None, rank:], cos, sin)
        to.store_vectors(torch.cat((norm(vectors[:, :rank])[:, None], end), 2))
        return torch.cat((query[..., :-rotary], turned(query[..., -rotary:], cos, sin)), 2)

    return store
