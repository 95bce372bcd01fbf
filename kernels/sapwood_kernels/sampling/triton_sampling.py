"""Triton: draws a token from each row of logits, in one kernel: temperature, top-k, top-p, min-p and the draw.

Each program takes a row. The filters are thresholds on a token's weight ``exp((logit - largest) / temperature)``, found without
sorting: top-k's is the largest t such that k weights are at least t, top-p's the largest such that the weights of at least t hold
the wanted mass. Non-negative float32 numbers are ordered as their bits are, so 30 bisections over the bits find t exactly; each
is a pass over the row, which lies in the L2 cache by then. (The CPU's partial sort would have to wait for the device to know how
far to sort.) The draw goes down the tree of ``cpu_sampling.py``.

Bound: reads a row once from memory and up to 64 times from the cache. O(V) for each row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sapwood_kernels.sampling.cpu_sampling import PLACES, SamplingBatch, block_levels


@triton.jit
def _mass(logits, largest, scale, least, V: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr):
    """The sum of a row's weights that are at least ``least``; with COUNT their number."""
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(logits + at, mask=at < V, other=float("-inf"))
        weights = tl.exp((values - largest) * scale)
        if COUNT:
            total += tl.where((weights >= least) & (at < V), 1.0, 0.0)
        else:
            total += tl.where(weights >= least, weights, 0.0)
    return tl.sum(total, axis=0)


@triton.jit
def _threshold(logits, largest, scale, floor, wanted, V: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr):
    """The largest t, at least ``floor``, such that the weights of at least t sum (with COUNT: number) to at least ``wanted``."""
    low = tl.cast(floor, tl.int32, bitcast=True)
    high = tl.cast(largest * 0.0 + 1.0, tl.int32, bitcast=True) + 1
    for _ in range(30):
        middle = low + (high - low) // 2
        enough = _mass(logits, largest, scale, tl.cast(middle, tl.float32, bitcast=True), V, BLOCK, COUNT) >= wanted
        low = tl.where(enough & (high - low > 1), middle, low)
        high = tl.where(enough, high, middle)
    return tl.cast(low, tl.float32, bitcast=True)


@triton.jit
def _weights(logits, at, largest, scale, least, V: tl.constexpr):
    """The weights of tokens, in float64; 0 where there is none, or less than ``least``."""
    weights = tl.exp((tl.load(logits + at, mask=at < V, other=float("-inf")) - largest) * scale)
    return tl.where(weights >= least, weights, 0.0).to(tl.float64)


@triton.jit
def _descend(weights, uniform, LEVELS: tl.constexpr):
    """``cpu_sampling._descend`` of one row of 8 to the ``LEVELS`` weights: the number of one."""
    found = tl.full((), 0, tl.int32)
    children = tl.arange(0, 8)
    for level in tl.static_range(LEVELS):
        if level < LEVELS - 1:
            groups = tl.reshape(weights, (8, 8 ** (LEVELS - 1 - level)))
            reached = tl.cumsum(tl.sum(groups, axis=1), axis=0)
        else:
            reached = tl.cumsum(weights, axis=0)
        total = tl.sum(tl.where(children == 7, reached, 0.0), axis=0)
        # Strictly below the sum even after rounding, so that the child found has a weight.
        target = tl.minimum(tl.load(uniform + level) * total, total * (1.0 - 2.0**-53))
        digit = tl.minimum(tl.sum((reached <= target).to(tl.int32), axis=0), 7)
        found = found * 8 + digit
        if level < LEVELS - 1:
            weights = tl.sum(tl.where((children == digit)[:, None], groups, 0.0), axis=0)
    return found


@triton.jit
def _sample_kernel(
    logits, rows, temperature, top_k, top_p, min_p, uniform, tokens, stride,
    V: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr, HAS_ROWS: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    row = index.to(tl.int64)
    if HAS_ROWS:
        row = tl.load(rows + index)
    logits += row * stride
    scale = 1.0 / tl.load(temperature + index)
    maxima = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        maxima = tl.maximum(maxima, tl.load(logits + at, mask=at < V, other=float("-inf")))
    largest = tl.max(maxima, axis=0)
    least = largest * 0.0
    k = tl.load(top_k + index)
    if k < V:
        least = _threshold(logits, largest, scale, least, k.to(tl.float32), V, BLOCK, True)
    p = tl.load(top_p + index)
    if p < 1.0:
        wanted = _mass(logits, largest, scale, least, V, BLOCK, False) * p.to(tl.float32)
        least = _threshold(logits, largest, scale, least, wanted, V, BLOCK, False)
    least = tl.maximum(least, tl.load(min_p + index))

    uniform += index * (4 + LEVELS)
    sums = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, V, BLOCK):
        sums += _weights(logits, start + tl.arange(0, BLOCK), largest, scale, least, V)
    place = _descend(sums, uniform, 4)
    inside = _weights(logits, place + BLOCK * tl.arange(0, 8**LEVELS), largest, scale, least, V)
    token = place + BLOCK * _descend(inside, uniform + 4, LEVELS)
    tl.store(tokens + index, tl.minimum(token, V - 1).to(tl.int64))


def sample_rows(logits: Tensor, largest: Tensor, batch: SamplingBatch) -> Tensor:
    """A token of each of the S rows that are sampled, int64 [S]; in a row that holds a NaN, or nothing to choose, any token.

    Args:
        logits: float32 [R, V], rows contiguous; not changed.
        largest: Not used: the kernel finds each row's largest logit itself.
        batch: The rows' settings.
    """
    width = logits.shape[1]
    tokens = torch.empty(batch.count, dtype=torch.int64, device=logits.device)
    _sample_kernel[(len(tokens),)](
        logits, logits if batch.rows is None else batch.rows, batch.temperature, batch.top_k, batch.top_p, batch.min_p,
        batch.uniform, tokens, logits.stride(0),
        V=width, BLOCK=PLACES, LEVELS=block_levels(width), HAS_ROWS=batch.rows is not None, num_warps=8,
    )  # fmt: skip
    return tokens
