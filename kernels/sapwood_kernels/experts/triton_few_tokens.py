"""Triton: the sum of each token's experts for few tokens, which seldom share one, in two launches.

Nothing is sorted. In the first launch a program multiplies the token of one pair with some gates of its expert's first matrix and
with what they let through; in the second it multiplies some rows of all experts of a token with what the first made, and has the
weighted sum. Products and sums are float32 throughout, on no matrix units. An expert that several tokens go to is read for each
of them. The first matrices are read as soon as experts are known, the second ones before the first launch has ended
(``dependent_launch``).

Bound: one read of the chosen experts' matrices.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sapwood_kernels import dependent_launch
from sapwood_kernels.experts.stack import DenseStack, StoredStack
from sapwood_kernels.experts.tiles.plan import TilePlan, TileShape
from sapwood_kernels.experts.triton_gate import Gate, gated, kind_of
from sapwood_kernels.experts.triton_widen import arguments, widened

_MOST_STEPS = 16
"""Steps that the compiler unrolls, at most."""
_UNDER_WAY = 192
"""Numbers of a row's experts that a thread of the second launch reads ahead, at most: more would not fit its registers."""


@triton.jit
def _rows(
    weight, scales, zeros, mins, table, expert, columns, inside, start, N, K: tl.constexpr, GROUP: tl.constexpr,
    TALL: tl.constexpr, BITS: tl.constexpr, INTEGERS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Numbers [BLOCK_N, BLOCK_K] of an expert's matrix from column ``start`` on, without its rows' factors."""
    if GROUP > 0:
        part = widened(
            weight, scales, zeros, mins, table, expert, columns, inside, start, N, K, GROUP, TALL, BITS, INTEGERS, BLOCK_N,
            BLOCK_K
        )  # fmt: skip
    else:
        at = start + tl.arange(0, BLOCK_K)
        # Offsets of 64 bits: all experts of a layer may have more than 2^31 numbers.
        row = (expert.to(tl.int64) * N + columns.to(tl.int64)) * K
        # No other program reads them: they need not stay in the L2 cache.
        part = tl.load(
            weight + row[:, None] + at[None, :], mask=inside[:, None] & (at < K)[None, :], other=0.0,
            eviction_policy="evict_first",
        )  # fmt: skip
    return part


@triton.jit
def _of_experts(
    weight, scales, zeros, mins, table, expert, columns, there, start, N, K: tl.constexpr, GROUP: tl.constexpr,
    TALL: tl.constexpr, BITS: tl.constexpr, INTEGERS: tl.constexpr, BLOCK_CHOSEN: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The same rows of several experts: [BLOCK_CHOSEN, BLOCK_N, BLOCK_K]; of those that are not ``there`` any finite numbers."""
    inside = there[:, None] & (columns < N)[None, :]
    if GROUP > 0:
        rows: tl.constexpr = BLOCK_CHOSEN * BLOCK_N
        shape: tl.constexpr = (BLOCK_CHOSEN, BLOCK_N)
        experts = tl.reshape(tl.broadcast_to(expert[:, None], shape), (rows,))
        places = tl.reshape(tl.broadcast_to(columns[None, :], shape), (rows,))
        part = tl.reshape(
            widened(
                weight, scales, zeros, mins, table, experts, places, tl.reshape(inside, (rows,)), start, N, K, GROUP, TALL, BITS,
                INTEGERS, rows, BLOCK_K,
            ),
            (BLOCK_CHOSEN, BLOCK_N, BLOCK_K),
        )  # fmt: skip
    else:
        at = start + tl.arange(0, BLOCK_K)
        row = (expert.to(tl.int64)[:, None] * N + columns[None, :]) * K
        part = tl.load(
            weight + row[:, :, None] + at[None, None, :], mask=inside[:, :, None] & (at < K)[None, None, :], other=0.0,
            eviction_policy="evict_first",
        )  # fmt: skip
    return part


@triton.jit
def _first_kernel(
    x, weight, scales, zeros, mins, table, factors, orders, bias, out, ids, alpha, limit, N, EXPERTS, SHARE: tl.constexpr,
    K: tl.constexpr, GATE: tl.constexpr, GROUP: tl.constexpr, TALL: tl.constexpr, BITS: tl.constexpr, INTEGERS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:  # in this order, for the next kernel reads what those before this one wrote
        gdc_wait()
        gdc_launch_dependents()
    pair = tl.program_id(0)
    expert = tl.load(ids + pair).to(tl.int32)
    if expert < EXPERTS:
        active = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = active < N // 2
        first, second = active, active + N // 2
        if GATE == 2:  # gates and gated values alternate
            first, second = 2 * active, 2 * active + 1
        total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        total_up = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        for start in tl.static_range(0, K, BLOCK_K):
            part = _rows(
                weight, scales, zeros, mins, table, expert, first, inside, start, N, K, GROUP, TALL, BITS, INTEGERS, BLOCK_N,
                BLOCK_K
            )  # fmt: skip
            part_up = _rows(
                weight, scales, zeros, mins, table, expert, second, inside, start, N, K, GROUP, TALL, BITS, INTEGERS, BLOCK_N,
                BLOCK_K
            )  # fmt: skip
            at = start + tl.arange(0, BLOCK_K)
            place = at
            if orders is not None:
                place = tl.load(orders + expert.to(tl.int64) * K + at, mask=at < K, other=0)
            taken = tl.load(x + pair // SHARE * K + place, mask=at < K, other=0.0).to(tl.float32)
            total += part.to(tl.float32) * taken[None, :]
            total_up += part_up.to(tl.float32) * taken[None, :]
        gate, up = tl.sum(total, axis=1), tl.sum(total_up, axis=1)
        if factors is not None:
            gate *= tl.load(factors + expert.to(tl.int64) * N + first, mask=inside, other=0.0).to(tl.float32)
            up *= tl.load(factors + expert.to(tl.int64) * N + second, mask=inside, other=0.0).to(tl.float32)
        if bias is not None:
            gate += tl.load(bias + expert * N + first, mask=inside, other=0.0).to(tl.float32)
            up += tl.load(bias + expert * N + second, mask=inside, other=0.0).to(tl.float32)
        result = gated(gate, up, alpha, limit, GATE)
        tl.store(out + pair * (N // 2) + active, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _second_kernel(
    inner, weight, scales, zeros, mins, table, factors, orders, bias, out, ids, weights, N, EXPERTS, CHOSEN: tl.constexpr,
    K: tl.constexpr, ADDS: tl.constexpr, GROUP: tl.constexpr, TALL: tl.constexpr, BITS: tl.constexpr, INTEGERS: tl.constexpr,
    BLOCK_CHOSEN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    token = tl.program_id(0)
    pair = token * CHOSEN + tl.arange(0, BLOCK_CHOSEN)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    chosen = tl.arange(0, BLOCK_CHOSEN) < CHOSEN
    # The kernel ahead has waited for these before it let this one begin.
    expert = tl.load(ids + pair, mask=chosen, other=EXPERTS, cache_modifier=".cg").to(tl.int32)
    factor = tl.load(weights + pair, mask=chosen, other=0.0, cache_modifier=".cg")
    # Outputs of experts on other ranks were never written, and are not read.
    there = expert < EXPERTS
    part = _of_experts(
        weight, scales, zeros, mins, table, expert, columns, there, 0, N, K, GROUP, TALL, BITS, INTEGERS, BLOCK_CHOSEN, BLOCK_N,
        BLOCK_K
    )  # fmt: skip
    if PDL:
        gdc_wait()
    total = tl.zeros((BLOCK_CHOSEN, BLOCK_N, BLOCK_K), tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        here = part
        if start + BLOCK_K < K:
            part = _of_experts(
                weight, scales, zeros, mins, table, expert, columns, there, start + BLOCK_K, N, K, GROUP, TALL, BITS, INTEGERS,
                BLOCK_CHOSEN, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        at = start + tl.arange(0, BLOCK_K)
        known = there[:, None] & (at < K)[None, :]
        place = tl.broadcast_to(at[None, :], (BLOCK_CHOSEN, BLOCK_K))
        if orders is not None:
            place = tl.load(orders + expert.to(tl.int64)[:, None] * K + at[None, :], mask=known, other=0)
        taken = tl.load(inner + pair[:, None] * K + place, mask=known, other=0.0)
        total += here.to(tl.float32) * (taken.to(tl.float32) * factor[:, None])[:, None, :]
    result = tl.sum(total, axis=2)
    inside = there[:, None] & (columns < N)[None, :]
    of_row = expert.to(tl.int64)[:, None] * N + columns[None, :]
    if factors is not None:
        result *= tl.load(factors + of_row, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        shift = tl.load(bias + of_row, mask=inside, other=0.0)
        result += shift.to(tl.float32) * factor[:, None]
    result = tl.sum(result, axis=0)
    target = out + token * N + columns
    if ADDS:
        result += tl.load(target, mask=columns < N, other=0.0).to(tl.float32)
    tl.store(target, result.to(out.dtype.element_ty), mask=columns < N)


def first(x: Tensor, ids: Tensor, stack: DenseStack | StoredStack, gate: Gate, shape: TileShape) -> Tensor:
    """``gate(x[pair // k] @ weight.T + bias)`` by each pair's expert: [T, K] -> [T * k, N / 2], in x's dtype; undefined without
    one."""
    active = stack.outputs // 2
    out = torch.empty(ids.numel(), active, dtype=x.dtype, device=x.device)
    tensors, sizes = _arguments(stack, x.shape[1], shape)
    kind, alpha, limit = kind_of(gate)
    _first_kernel[(ids.numel(), triton.cdiv(active, shape.width))](
        x, *tensors, out, ids, alpha, limit, stack.outputs, stack.experts, SHARE=ids.shape[1], GATE=kind, **sizes,
        **dependent_launch.options(x, dependent_launch.MIXTURE_ROWS),
    )  # fmt: skip
    return out


def second(
    inner: Tensor,
    ids: Tensor,
    weights: Tensor,
    stack: DenseStack | StoredStack,
    shape: TileShape,
    add_to: Tensor | None = None,
) -> Tensor:
    """The weighted sum of ``inner @ weight.T + bias`` over a token's experts: [T * k, K] -> [T, N], in inner's dtype; added to
    ``add_to`` in place if that is given. Nothing is launched between :func:`first` and this."""
    out = add_to
    if out is None:
        out = torch.empty(len(ids), stack.outputs, dtype=inner.dtype, device=inner.device)
    chosen = triton.next_power_of_2(ids.shape[1])
    while shape.width > 1 and chosen * shape.width * inner.shape[1] > _UNDER_WAY * 32 * shape.warps:
        shape = shape._replace(width=shape.width // 2)
    tensors, sizes = _arguments(stack, inner.shape[1], shape)
    _second_kernel[(len(ids), triton.cdiv(stack.outputs, shape.width))](
        inner, *tensors, out, ids, weights, stack.outputs, stack.experts, CHOSEN=ids.shape[1], ADDS=add_to is not None,
        BLOCK_CHOSEN=chosen, **sizes, **dependent_launch.options(ids, dependent_launch.MIXTURE_ROWS),
    )  # fmt: skip
    return out


def expert_sum(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: DenseStack | StoredStack,
    down: DenseStack | StoredStack,
    gate: Gate,
    plan: TilePlan,
    add_to: Tensor | None = None,
) -> Tensor:
    """Computes ``triton_experts.expert_sum``, whose arguments these are, by a plan whose tiles are one pair high."""
    return second(first(x, ids, gate_up, gate, plan.gate_up), ids, weights, down, plan.down, add_to)


def _arguments(
    stack: DenseStack | StoredStack, width: int, shape: TileShape
) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
    """A matrix as both kernels take it: its tensors, and its sizes with those of the tile."""
    depth = max(shape.depth, triton.next_power_of_2(triton.cdiv(width, _MOST_STEPS)))
    depth = min(depth, triton.next_power_of_2(width))
    tensors, constants = arguments(stack, depth)
    return tensors, {**constants, "K": width, "BLOCK_N": shape.width, "BLOCK_K": depth, "num_warps": shape.warps}
