"""Sampling on a CPU: from logits to tokens, with random numbers that depend on seed and position alone.

The draw goes down a tree whose nodes have eight children, with a random number at each: token ``p + PLACES * b`` is found by the
four digits of its place p, then by those of its block b. A node's children are chosen among by the inverse of their cumulative
distribution. So logits that are rounded a little otherwise, as in a batch of another size, seldom choose another token: the tree
has a few dozen borders between children, where the cumulative distribution of a whole vocabulary has as many as tokens.

Complexity for R rows of V logits: O(R V) without top-k and top-p; top-k adds a partial sort for the largest k; top-p a partial
sort of the ``_FIRST_CANDIDATES`` likeliest, then of 16 times more while some row needs them, at worst of all.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

# Random numbers that are a pure function of (seed, position, number).
#
# Algorithm: the output function of SplitMix64 (Steele, Lea and Flood, 2014) applied twice, first to the seed, then to
# that plus the position times the golden ratio, and the number times another odd constant. No state, so a request draws
# the same numbers in any batch and after a restart.


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def uniform(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.float64]:
    """So many numbers in [0, 1) with 53 random bits for each pair: float64 [R, count].

    Args:
        seeds: uint64 [R].
        positions: int64 [R].
        count: How many.
    """
    # The hash relies on wrap-around.
    with np.errstate(over="ignore"):
        pairs = _mix(seeds + _GOLDEN) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        mixed = _mix(pairs[:, None] + np.arange(count, dtype=np.uint64) * _SECOND)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * _FIRST
    value = (value ^ (value >> np.uint64(27))) * _SECOND
    return value ^ (value >> np.uint64(31))


# Forbids tokens by bit masks. This is the plain-torch reference, and fast enough to be used on a CPU.


def apply_token_bitmask(logits: Tensor, bitmask: Tensor, rows: Tensor | None = None) -> None:
    """Sets the logits of forbidden tokens to minus infinity, in place.

    Args:
        logits: float [R, V]; changed.
        bitmask: int32 [G, W] on the same device: bit ``i % 32`` of word ``i // 32`` says whether token i is allowed; tokens
            beyond ``32 W`` are forbidden.
        rows: int64 [G]: the row of ``logits`` that each mask is for, each once; None: mask g is for row g, and G is R.

    Cost: O(G V) whatever the masks hold. Assumes a little-endian machine, as every one that torch runs on is.
    """
    masks, words = bitmask.shape
    width = logits.shape[1]
    packed = _table(logits.device).index_select(0, bitmask.contiguous().view(torch.uint8).flatten().int())
    forbidden = packed.view(torch.bool).view(masks, words * 32)[:, :width]
    if words * 32 < width:
        forbidden = torch.nn.functional.pad(forbidden, (0, width - words * 32), value=True)
    if rows is None:
        logits.masked_fill_(forbidden, float("-inf"))
    else:
        logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(forbidden, float("-inf")))


@functools.cache
def _table(device: torch.device) -> Tensor:
    """int64 [256]: for each byte of a mask eight booleans of a byte each, true where the token is forbidden."""
    entries = [sum(1 << (8 * bit) for bit in range(8) if not byte >> bit & 1) for byte in range(256)]
    return torch.tensor(entries, dtype=torch.int64, device=device)


_FIRST_CANDIDATES = 1024
_GROWTH = 16
PLACES = 4096
"""Tokens of a block, 8 to the 4th."""
SETTINGS = 5
"""Numbers of a request's settings: temperature (0: the likeliest token), top-k (the vocabulary's size: none), top-p, min-p, each
but top-k a float64, and the seed, an uint64; all with their bits in an int64."""
_CHILDREN = 8
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
        uniform: float64 [S, :func:`levels`]: each row's random numbers.
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


def levels(width: int) -> int:
    """How many levels the tree of a vocabulary of ``width`` tokens has: a draw takes one random number for each."""
    return 4 + block_levels(width)


def block_levels(width: int) -> int:
    """How many of these are of blocks: the fewest digits to base 8 that number all blocks, at least one."""
    blocks, found = -(-width // PLACES), 1
    while _CHILDREN**found < blocks:
        found += 1
    return found


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


def draw_rows(logits: Tensor, settings: Tensor, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's likeliest token, and its token by its request's settings: both int64 [R], -1 where logits are not finite.

    Args:
        logits: [R, V] of any float dtype.
        settings: int64 [S, :data:`SETTINGS`].
        slots: int64 [R]: the settings of each row.
        positions: int64 [R]: the position before that of each row's token.
    """
    logits = logits.float()
    largest, greedy = row_max(logits)
    own = settings.index_select(0, slots)
    floats = own.view(torch.float64)
    rows = floats[:, 0].nonzero()[:, 0]
    if not len(rows):
        return greedy, greedy
    own, floats = own[rows], floats[rows]
    seeds, at = own[:, 4].numpy().view("uint64"), (positions[rows] + 1).numpy()
    limited = own[:, 1][own[:, 1] < logits.shape[1]]
    batch = SamplingBatch(
        rows=rows,
        count=len(rows),
        temperature=floats[:, 0:1].float(),
        top_k=own[:, 1:2],
        top_p=floats[:, 2:3],
        min_p=floats[:, 3:4].float(),
        uniform=torch.from_numpy(uniform(seeds, at, levels(logits.shape[1]))),
        most_k=int(limited.max()) if len(limited) else 0,
        any_top_p=bool((floats[:, 2] < 1.0).any()),
    )
    drawn = greedy.index_copy(0, rows, sample_rows(logits, largest, batch))
    return greedy, torch.where(greedy < 0, greedy, drawn)


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
    return _draw(weights, batch.uniform)


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


def _draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Goes down the tree of each row's weights: int64 [S]; any token of a row that holds a NaN, or no weight."""
    width = weights.shape[1]
    blocks = _CHILDREN ** block_levels(width)
    weights = F.pad(weights, (0, -width % PLACES)).view(len(weights), -1, PLACES)
    sums = weights[:, 0].double()
    for each in weights.unbind(1)[1:]:
        sums += each  # of 32 rows an eighth of the time of sum()
    place = _descend(sums, uniform[:, :4])
    inside = weights.gather(2, place[:, None, None].expand(-1, weights.shape[1], 1))[:, :, 0].double()
    block = _descend(F.pad(inside, (0, blocks - inside.shape[1])), uniform[:, 4:])
    return (block * PLACES + place).clamp_(max=width - 1)


def _descend(weights: Tensor, uniform: Tensor) -> Tensor:
    """Chooses one of the W weights of each row, float64 [S, W], digit by digit of its number, the highest first: int64 [S]."""
    rows = torch.arange(len(weights), device=weights.device)
    found = torch.zeros_like(rows)
    for number in uniform.unbind(1):
        weights = weights.view(len(weights), _CHILDREN, -1)
        reached = weights.sum(2).cumsum(1)
        # Strictly below the sum even after rounding, so that the child found has a weight.
        target = torch.minimum(number * reached[:, -1], reached[:, -1] * _BELOW_ONE)
        # In a row that holds a NaN, or no weight, any child will do.
        digit = (reached <= target[:, None]).sum(1).clamp_(max=_CHILDREN - 1)
        found = found * _CHILDREN + digit
        weights = weights[rows, digit]
    return found


def _divisor(width: int) -> int:
    """The divisor of ``width`` nearest its square root from below, or 1 if that is too small to help."""
    best = math.isqrt(width)
    while width % best:
        best -= 1
    return best if best >= 32 else 1
