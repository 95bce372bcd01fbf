"""Draws tokens with plain torch calls, fast enough for a CPU.

Complexity for R rows of V logits: O(R V) without top-k and top-p; top-k adds a partial sort for the largest k; top-p a partial
sort of the ``_FIRST_CANDIDATES`` likeliest, then of 16 times more while some row needs them, at worst of all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_FIRST_CANDIDATES = 1024
_GROWTH = 16
# Two levels of sums: over blocks of this many tokens, then within one.
_BLOCK = 512
# The largest factor below 1 in float64.
_BELOW_ONE = 1.0 - 2.0**-53


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Settings of the S rows of R that are not greedy.

    Attributes:
        rows: int64 [S]: these rows; None when they are all R.
        count: S.
        temperature: float32 [S, 1], over 0.
        top_k: int64 [S, 1], in 1 .. vocabulary size.
        top_p: float64 [S, 1].
        min_p: float32 [S, 1].
        uniform: float64 [S, 1]: each row's random number.
        most_k: The largest of ``top_k`` below the vocabulary size; 0 when no row has one.
        any_top_p: Whether some row's ``top_p`` is below 1.
    """

    rows: Tensor | None
    count: int
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor
    most_k: int
    any_top_p: bool


def row_max(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's maximum, NaN if the row holds one, and its first index, -1 if it is not finite: ``max(-1)``, in two levels.

    A maximum alone is vectorised where one with its index is not: on a CPU this is several times faster.
    """
    rows, width = logits.shape
    block = _divisor(width)
    if block == 1:
        largest, at = logits.max(-1)
    else:
        blocks = logits.view(rows, width // block, block)
        largest, part = blocks.amax(-1).max(-1)
        at = part * block + blocks[torch.arange(rows, device=logits.device), part].argmax(-1)
    return largest, torch.where(largest.abs() < float("inf"), at, -1)


def sample_rows(logits: Tensor, largest: Tensor, batch: SamplingBatch) -> Tensor:
    """Draws a token of each row that is sampled: int64 [S].

    Args:
        logits: float32 [R, V]; not changed.
        largest: float32 [R]: each row's largest logit.
        batch: Settings of the S rows that are sampled.
    """
    if batch.rows is None:
        return _sample_rows(logits, largest[:, None], batch)
    return _sample_rows(logits.index_select(0, batch.rows), largest[batch.rows, None], batch)


def _sample_rows(logits: Tensor, largest: Tensor, batch: SamplingBatch) -> Tensor:
    # Probabilities up to a factor; the likeliest has exactly 1. A new tensor: the caller's logits stay.
    weights = (logits - largest).div_(batch.temperature).exp_()
    threshold = batch.min_p
    if batch.most_k or batch.any_top_p:
        threshold = torch.maximum(threshold, _top_threshold(weights, batch))
    weights.masked_fill_(weights < threshold, 0.0)
    return _inverse_cdf(weights, batch.uniform)


def _top_threshold(weights: Tensor, batch: SamplingBatch) -> Tensor:
    """float32 [S, 1]: the smallest weight that top-k and top-p keep."""
    width = weights.shape[1]
    count = min(max(batch.most_k, _FIRST_CANDIDATES if batch.any_top_p else 1), width)
    best = weights.topk(count, dim=-1).values
    threshold = torch.zeros_like(batch.min_p)
    if batch.most_k:
        kth = best.gather(1, (batch.top_k - 1).clamp_(max=count - 1))
        threshold = torch.where(batch.top_k < width, kth, threshold)
    if not batch.any_top_p:
        return threshold
    mass = torch.where(weights >= threshold, weights, 0.0).sum(-1, keepdim=True, dtype=torch.float64)
    wanted = mass * batch.top_p
    while True:
        reached = best.cumsum(-1, dtype=torch.float64)
        # Not "reached": a row that holds a NaN never does.
        missing = (reached[:, -1:] < wanted) & (batch.top_p < 1.0)
        if count == width or not bool(missing.any()):
            break
        count = min(count * _GROWTH, width)
        best = weights.topk(count, dim=-1).values
    # A token is kept when those before it have not reached the wanted mass.
    kept = (reached - best < wanted).sum(-1, keepdim=True)
    last = best.gather(1, (kept - 1).clamp_(min=0))
    return torch.where(batch.top_p < 1.0, torch.maximum(threshold, last), threshold)


def _inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """The index in each row at which the running sum first exceeds ``uniform`` times the row's sum."""
    rows, width = weights.shape
    if width % _BLOCK:
        weights = F.pad(weights, (0, -width % _BLOCK))
    blocks = weights.view(rows, -1, _BLOCK)
    sums = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    # Strictly below the sum even after rounding, so that the index found has a weight.
    target = torch.minimum(uniform * sums[:, -1:], sums[:, -1:] * _BELOW_ONE)
    # In a row that holds a NaN the search finds nothing; any valid index will do.
    block = torch.searchsorted(sums, target, right=True).clamp_(max=sums.shape[1] - 1)
    before = torch.where(block > 0, sums.gather(1, (block - 1).clamp_(min=0)), 0.0)
    inner = blocks[torch.arange(rows, device=weights.device), block[:, 0]].cumsum(-1, dtype=torch.float64)
    rest = torch.minimum((target - before).clamp_(min=0.0), inner[:, -1:] * _BELOW_ONE)
    within = torch.searchsorted(inner, rest, right=True)
    return (block * _BLOCK + within)[:, 0].clamp_(max=width - 1)


def _divisor(width: int) -> int:
    """The divisor of ``width`` nearest its square root from below, or 1 if that is too small to help."""
    best = math.isqrt(width)
    while width % best:
        best -= 1
    return best if best >= 32 else 1
