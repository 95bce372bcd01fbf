"""Triton: the sum of each token's experts for few tokens, which seldom share one, in two launches.

Nothing is sorted. In the first launch a program multiplies the token of one pair with rows of its expert's first matrix; in the
second it multiplies rows of all experts of a token with their activations, which it makes as it reads, and has the weighted sum.
Products and sums are float32 throughout, on no matrix units. An expert that several tokens go to is read for each of them.

Bound: one read of the chosen experts' matrices.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sapwood_kernels.experts.stack import DenseStack, StoredStack
from sapwood_kernels.experts.tiles import TilePlan, TileShape
from sapwood_kernels.experts.triton_gate import Gate, gated, kind_of
from sapwood_kernels.experts.triton_widen import widened


@triton.jit
def _rows(
    weight, scales, zeros, expert, columns, inside, start, N, K: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
    INTEGERS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Numbers [BLOCK_N, BLOCK_K] of an expert's matrix from column ``start`` on, float32; 0 where ``inside`` is not."""
    if GROUP > 0:
        part = widened(
            weight, scales, zeros, expert, columns, inside, start, N, K, GROUP, BITS, INTEGERS, BLOCK_N, BLOCK_K
        )
    else:
        at = start + tl.arange(0, BLOCK_K)
        # Offsets of 64 bits: all experts of a layer may have more than 2^31 numbers.
        row = (expert.to(tl.int64) * N + columns.to(tl.int64)) * K
        part = tl.load(weight + row[:, None] + at[None, :], mask=inside[:, None] & (at < K)[None, :], other=0.0)
    return part.to(tl.float32)


@triton.jit
def _activated(inner, at, inside, alpha, limit, K: tl.constexpr, GATE: tl.constexpr):
    """float32: a pair's activations at places of K, made of its 2 K numbers."""
    if GATE == 2:  # gates and what they let through take turns
        gate = tl.load(inner + 2 * at, mask=inside, other=0.0)
        up = tl.load(inner + 2 * at + 1, mask=inside, other=0.0)
    else:
        gate = tl.load(inner + at, mask=inside, other=0.0)
        up = tl.load(inner + K + at, mask=inside, other=0.0)
    return gated(gate.to(tl.float32), up.to(tl.float32), alpha, limit, GATE)


@triton.jit
def _first_kernel(
    x, weight, scales, zeros, bias, out, ids, N, EXPERTS, SHARE: tl.constexpr, K: tl.constexpr, HAS_BIAS: tl.constexpr,
    GROUP: tl.constexpr, BITS: tl.constexpr, INTEGERS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0)
    expert = tl.load(ids + pair).to(tl.int32)
    if expert < EXPERTS:
        columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = columns < N
        total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        for start in range(0, K, BLOCK_K):
            at = start + tl.arange(0, BLOCK_K)
            taken = tl.load(x + pair // SHARE * K + at, mask=at < K, other=0.0).to(tl.float32)
            part = _rows(
                weight, scales, zeros, expert, columns, inside, start, N, K, GROUP, BITS, INTEGERS, BLOCK_N, BLOCK_K
            )
            total += part * taken[None, :]
        result = tl.sum(total, axis=1)
        if HAS_BIAS:
            result += tl.load(bias + expert * N + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + pair * N + columns, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _second_kernel(
    inner, weight, scales, zeros, bias, out, ids, weights, alpha, limit, N, EXPERTS, CHOSEN: tl.constexpr, K: tl.constexpr,
    GATE: tl.constexpr, ADDS: tl.constexpr, HAS_BIAS: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
    INTEGERS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    shift = tl.zeros((BLOCK_N,), tl.float32)
    # No branches: reads of one expert are under way while another's are awaited.
    for each in tl.static_range(CHOSEN):
        pair = token * CHOSEN + each
        expert = tl.load(ids + pair).to(tl.int32)
        # What an expert that is not here would have made was never written, and is not read.
        inside = columns < tl.where(expert < EXPERTS, N, 0)
        width = tl.where(expert < EXPERTS, K, 0)
        factor = tl.load(weights + pair)
        for start in range(0, K, BLOCK_K):
            at = start + tl.arange(0, BLOCK_K)
            taken = factor * _activated(inner + pair * 2 * K, at, at < width, alpha, limit, K, GATE)
            part = _rows(
                weight, scales, zeros, expert, columns, inside, start, N, K, GROUP, BITS, INTEGERS, BLOCK_N, BLOCK_K
            )
            total += part * taken[None, :]
        if HAS_BIAS:
            shift += factor * tl.load(bias + expert * N + columns, mask=inside, other=0.0).to(tl.float32)
    result = tl.sum(total, axis=1) + shift
    target = out + token * N + columns
    if ADDS:
        result += tl.load(target, mask=columns < N, other=0.0).to(tl.float32)
    tl.store(target, result.to(out.dtype.element_ty), mask=columns < N)


def first(x: Tensor, ids: Tensor, stack: DenseStack | StoredStack, shape: TileShape) -> Tensor:
    """``x[pair // k] @ weight.T + bias`` by each pair's expert: [T, K] -> [T * k, N], in x's dtype; undefined without one."""
    out = torch.empty(ids.numel(), stack.outputs, dtype=x.dtype, device=x.device)
    tensors, sizes, blocks = _arguments(stack, x.shape[1], shape)
    _first_kernel[(ids.numel(), triton.cdiv(stack.outputs, shape.width))](
        x, *tensors, out, ids, stack.outputs, stack.experts, SHARE=ids.shape[1], **sizes, **blocks
    )
    return out


def second(
    inner: Tensor,
    ids: Tensor,
    weights: Tensor,
    stack: DenseStack | StoredStack,
    gate: Gate,
    shape: TileShape,
    add_to: Tensor | None = None,
) -> Tensor:
    """The weighted sum of ``gate(inner) @ weight.T + bias`` over a token's experts: [T * k, 2 K] -> [T, N], in inner's dtype;
    added to ``add_to`` in place if that is given."""
    out = add_to
    if out is None:
        out = torch.empty(len(ids), stack.outputs, dtype=inner.dtype, device=inner.device)
    tensors, sizes, blocks = _arguments(stack, inner.shape[1] // 2, shape)
    kind, alpha, limit = kind_of(gate)
    _second_kernel[(len(ids), triton.cdiv(stack.outputs, shape.width))](
        inner, *tensors, out, ids, weights, alpha, limit, stack.outputs, stack.experts, CHOSEN=ids.shape[1], GATE=kind,
        ADDS=add_to is not None, **sizes, **blocks,
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
    return second(first(x, ids, gate_up, plan.gate_up), ids, weights, down, gate, plan.down, add_to)


def _arguments(
    stack: DenseStack | StoredStack, width: int, shape: TileShape
) -> tuple[tuple[Tensor, ...], dict[str, int], dict[str, int]]:
    """A matrix as both kernels take it: its tensors, its sizes, and the tile."""
    if isinstance(stack, DenseStack):
        weight, scales, zeros, group, bits = stack.weight, stack.weight, None, 0, 0
    else:
        weight, scales, zeros, group, bits = stack.codes, stack.scales, stack.zeros, stack.group, stack.bits
    depth = min(shape.depth, triton.next_power_of_2(width))
    if group & (group - 1):  # then it is all of a row
        depth = min(depth, 1 << (group.bit_length() - 1))
    tensors = weight, scales, weight if zeros is None else zeros, weight if stack.bias is None else stack.bias
    sizes = {
        "K": width, "HAS_BIAS": stack.bias is not None, "GROUP": group, "BITS": bits, "INTEGERS": zeros is not None,
    }  # fmt: skip
    return tensors, sizes, {"BLOCK_N": shape.width, "BLOCK_K": depth, "num_warps": shape.warps}
