"""Triton: head norms, rotation and the KV write in one kernel, all between the QKV projection and attention.

One program takes a few heads of a token. Separately these are five launches over data that fits in registers; at batch 1 a launch
costs more than the work. For a float8 cache, numbers are divided by the layer's scale and clamped to the type's range.
Bound: reads the projection once, writes each head once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sapwood_kernels import dependent_launch
from sapwood_kernels.rotary_pairs import RotaryPairs

_LARGEST_E4M3 = tl.constexpr(448.0)
_ELEMENTS = 512  # elements of a program, a warp; 1024 by two: 78, not 66 us for 8192 tokens of 40 heads on an H100
_FEW_TOKENS = 64  # up to this many tokens, programs take one head each: 1.4 instead of 2.6 us for one token on an H200


@triton.jit
def as_stored(x, scale, SCALED: tl.constexpr):
    """``x`` in the cache's format; ``scale`` is one over the cache's scale."""
    if SCALED:
        x = tl.minimum(tl.maximum(x.to(tl.float32) * scale, -_LARGEST_E4M3), _LARGEST_E4M3)
    return x


@triton.jit
def _qkv_kernel(
    qkv, query, keys, values, slots, cos, sin, q_weight, k_weight, eps, key_factor, value_factor,
    page_stride, slot_stride, head_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    PAGE: tl.constexpr, NORM: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_HALF: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    half: tl.constexpr = DIM // 2
    all_heads: tl.constexpr = HEADS + 2 * KV_HEADS
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    there = pair < half
    # Where the two numbers of each pair are; those that are not turned are paired, too, with an angle of 0.
    if INTERLEAVED:
        one, two = 2 * pair, 2 * pair + 1
    elif ROTATED == DIM:
        one, two = pair, pair + half
    else:
        turned = pair < ROTATED // 2
        one = tl.where(turned, pair, pair + ROTATED // 2)
        two = tl.where(turned, pair + ROTATED // 2, pair + half)
    inside = (heads < all_heads)[:, None] & there
    source = qkv + (token * all_heads + heads[:, None]) * DIM
    first = tl.load(source + one, mask=inside, other=0.0)
    second = tl.load(source + two, mask=inside, other=0.0)
    low, high = first.to(tl.float32), second.to(tl.float32)
    is_query = (heads < HEADS)[:, None] & there
    if NORM:
        scale = tl.rsqrt((tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / DIM + eps)[:, None]
        q_one, k_one = tl.load(q_weight + one, mask=there, other=0.0), tl.load(k_weight + one, mask=there, other=0.0)
        q_two, k_two = tl.load(q_weight + two, mask=there, other=0.0), tl.load(k_weight + two, mask=there, other=0.0)
        low *= scale * tl.where(is_query, q_one, k_one)
        high *= scale * tl.where(is_query, q_two, k_two)
    cosine = tl.load(cos + token * DIM + one, mask=there, other=0.0).to(tl.float32)
    sine = tl.load(sin + token * DIM + two, mask=there, other=0.0).to(tl.float32)
    turned_low = (low * cosine - high * sine).to(qkv.dtype.element_ty)
    turned_high = (high * cosine + low * sine).to(qkv.dtype.element_ty)
    target = query + (token * HEADS + heads[:, None]) * DIM
    tl.store(target + one, turned_low, mask=is_query)
    tl.store(target + two, turned_high, mask=is_query)
    slot = tl.load(slots + token)
    slot = slot // PAGE * page_stride + slot % PAGE * slot_stride
    is_key = ((heads >= HEADS) & (heads < HEADS + KV_HEADS))[:, None] & there
    target = keys + slot + (heads[:, None] - HEADS) * head_stride
    stored = keys.dtype.element_ty
    tl.store(target + one, as_stored(turned_low, key_factor, SCALED).to(stored), mask=is_key)
    tl.store(target + two, as_stored(turned_high, key_factor, SCALED).to(stored), mask=is_key)
    is_value = (heads >= HEADS + KV_HEADS)[:, None] & inside
    target = values + slot + (heads[:, None] - HEADS - KV_HEADS) * head_stride
    tl.store(target + one, as_stored(first, value_factor, SCALED).to(stored), mask=is_value)
    tl.store(target + two, as_stored(second, value_factor, SCALED).to(stored), mask=is_value)


def norm_rope_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    slots: Tensor,
    scales: tuple[float, float] = (1.0, 1.0),
    *,
    num_heads: int,
    norm_weights: tuple[Tensor, Tensor] | None,
    eps: float,
    pairs: RotaryPairs | None = None,
    heads_together: int | None = None,
) -> Tensor:
    """Norms and rotates query and key heads, writes keys and values to the cache, returns the query heads.

    Args:
        qkv: Contiguous [T, (H + 2K) * D]: query, key, value heads side by side.
        cos: [T, D] or [T, 1, D], contiguous, as ``reference.rope`` takes it.
        sin: Likewise.
        key_pages: [P, S, K, D] in any order except that D is last, mutated at ``slots``; of qkv's dtype or float8_e4m3fn.
        value_pages: The same, in the same order, for values.
        slots: int64 [T]: ``page * S + offset``.
        scales: The divisors of keys and values for a float8 cache.
        num_heads: H.
        norm_weights: float32 [D] for query heads and for key heads; None: no norm.
        eps: Added to the mean square in the norms.
        pairs: Which numbers are rotated together; None: the halves of a head.
        heads_together: Heads of a program, a power of 2; None: by the number of tokens.

    Returns:
        [T, H, D].
    """
    tokens = qkv.shape[0]
    page_size, kv_heads, dim = key_pages.shape[1:]
    assert key_pages.stride() == value_pages.stride() and key_pages.stride(3) == 1, "keys and values lie differently"
    query = torch.empty((tokens, num_heads, dim), dtype=qkv.dtype, device=qkv.device)
    q_weight, k_weight = norm_weights if norm_weights is not None else (cos, cos)
    heads = num_heads + 2 * kv_heads
    pairs = pairs or RotaryPairs(dim, dim)
    fitting = 1 if tokens <= _FEW_TOKENS else min(max(1, _ELEMENTS // dim), triton.next_power_of_2(heads))
    block = heads_together or fitting
    _qkv_kernel[(tokens, triton.cdiv(heads, block))](
        qkv, query, key_pages, value_pages, slots, cos, sin, q_weight, k_weight, eps, 1.0 / scales[0], 1.0 / scales[1],
        *key_pages.stride()[:3],
        HEADS=num_heads, KV_HEADS=kv_heads, DIM=dim, ROTATED=pairs.rotated, INTERLEAVED=pairs.interleaved, PAGE=page_size,
        NORM=norm_weights is not None, SCALED=key_pages.dtype == torch.float8_e4m3fn, BLOCK=block,
        BLOCK_HALF=triton.next_power_of_2(dim // 2), num_warps=1,
        **dependent_launch.options(qkv),
    )  # fmt: skip
    return query
