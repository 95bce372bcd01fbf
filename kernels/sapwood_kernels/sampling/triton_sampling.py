"""Triton: draws a token from each row of logits: temperature, top-k, top-p, min-p and the draw, and the likeliest token as well.

Two kernels, which a graph can hold: of a step they need its logits, each row's slot of the settings, and its position. The first
takes a row in 64 parts, each of 64 places of all blocks (``cpu_sampling.py`` says what these are): a part's largest logit and the
sum of its weights ``exp((logit - largest) / temperature)``. A part is a node of the second level of the tree that a draw goes
down. So the second kernel, a program a row, draws a part by these sums, and reads only that part again.

A filter is a threshold on a token's weight, found without sorting: top-k's is the largest t such that k weights are at least t,
top-p's the largest such that the weights of at least t hold the wanted mass. Non-negative float32 numbers are ordered as their
bits are, so a search over the bits finds t exactly. It searches candidates first. These are all tokens at least as likely as the
best token of the k-th best part; there are about k of them. If these are too many, or hold too little of the mass, it
searches the whole row, eight thresholds in a pass.

Bound: a row is read once; with filters twice; of a flat distribution with top-p or min-p up to 24 times. O(V) for each row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sapwood_kernels import dependent_launch
from sapwood_kernels.sampling.cpu_sampling import PLACES, SETTINGS, SamplingBatch, block_levels

_PARTS = 64
"""Nodes of the tree's second level."""
_CANDIDATES = 1024
"""Most tokens among which a threshold is searched without the rest of the row."""
_WARPS = 16


@triton.jit
def _weigh(values, inside, largest, scale):
    """The weights of logits; 0 where there is none."""
    weights = tl.exp((values - largest) * scale)
    return tl.where(inside & (values > float("-inf")), weights, 0.0)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _part_kernel(
    logits, rows, slots, temperature, maxima, places, sums, stride, step,
    V: tl.constexpr, BLOCKS: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_SLOTS: tl.constexpr, PLACES: tl.constexpr,
    PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    index, part = tl.program_id(0), tl.program_id(1)
    row, setting = index.to(tl.int64), index.to(tl.int64)
    if HAS_ROWS:
        row = tl.load(rows + index)
    if HAS_SLOTS:
        setting = tl.load(slots + index)
    width: tl.constexpr = PLACES // PARTS
    at = PLACES * tl.arange(0, BLOCKS)[:, None] + part * width + tl.arange(0, width)[None, :]
    values = tl.load(logits + row * stride + at, mask=at < V, other=float("-inf")).to(tl.float32)
    largest = tl.max(tl.max(values, axis=1), axis=0)
    broken = tl.max(tl.max((values != values).to(tl.int32), axis=1), axis=0) > 0
    place = tl.min(tl.min(tl.where(values == largest, at, V - 1), axis=1), axis=0)
    target = index * PARTS + part
    tl.store(maxima + target, tl.where(broken, float("nan"), largest))
    tl.store(places + target, place)
    heat = tl.load(temperature + setting * step).to(tl.float32)
    if heat > 0.0:
        weights = _weigh(values, at < V, largest, 1.0 / heat).to(tl.float64)
        tl.store(sums + target, tl.sum(tl.sum(weights, axis=1), axis=0))


@triton.jit
def _mix(value):
    """The output function of SplitMix64 (``cpu_sampling.py``)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def _number(uniform, pair, at: tl.constexpr, HAS_SLOTS: tl.constexpr):
    """A random number in [0, 1): that at a place of ``uniform``, or made of a seed and a position."""
    if HAS_SLOTS:
        mixed = _mix(pair + tl.full((), at, tl.uint64) * 0x94D049BB133111EB)
        found = (mixed >> 11).to(tl.float64) * (2.0**-53)
    else:
        found = tl.load(uniform + at)
    return found


@triton.jit
def _child(sums, number):
    """Chooses among the weights of eight children by a random number."""
    children = tl.arange(0, 8)
    reached = tl.cumsum(sums, axis=0)
    total = tl.sum(tl.where(children == 7, reached, 0.0), axis=0)
    # Strictly below the sum even after rounding, so that the child found has a weight.
    target = tl.minimum(number * total, total * (1.0 - 2.0**-53))
    return tl.minimum(tl.sum((reached <= target).to(tl.int32), axis=0), 7)


@triton.jit
def _descend(weights, uniform, pair, first: tl.constexpr, levels: tl.constexpr, HAS_SLOTS: tl.constexpr):
    """``cpu_sampling._descend`` of one row of 8 to the ``levels`` weights, by the random numbers from ``first`` on."""
    found = tl.full((), 0, tl.int32)
    children = tl.arange(0, 8)
    for level in tl.static_range(levels):
        number = _number(uniform, pair, first + level, HAS_SLOTS)
        if level < levels - 1:
            groups = tl.reshape(weights, (8, 8 ** (levels - 1 - level)))
            digit = _child(tl.sum(groups, axis=1), number)
            weights = tl.sum(tl.where((children == digit)[:, None], groups, 0.0), axis=0)
        else:
            digit = _child(weights, number)
        found = found * 8 + digit
    return found


@triton.jit
def _among(tokens, weights, uniform, pair, LEVELS: tl.constexpr, HAS_SLOTS: tl.constexpr, PLACES: tl.constexpr):
    """The same draw among some tokens, those without a weight left out."""
    children = tl.arange(0, 8)
    key = (
        tokens % PLACES
    ) * 8**LEVELS + tokens // PLACES  # its digits to base 8 are those of the place, then of the block
    found = tl.full((), 0, tl.int32)
    for level in tl.static_range(4 + LEVELS):
        digits = key >> (3 * (3 + LEVELS - level))
        alive = tl.where((digits >> 3) == found, weights, 0.0)
        sums = tl.sum(tl.where((digits & 7)[None, :] == children[:, None], alive[None, :], 0.0), axis=1)
        found = found * 8 + _child(sums, _number(uniform, pair, level, HAS_SLOTS))
    return (found & (8**LEVELS - 1)) * PLACES + (found >> (3 * LEVELS))


@triton.jit
def _threshold_among(weights, floor, wanted, COUNT: tl.constexpr):
    """The largest t, at least ``floor``, such that the weights of at least t sum (with COUNT: number) to at least ``wanted``."""
    low = tl.cast(floor, tl.int32, bitcast=True)
    high = tl.full((), 0x3F800001, tl.int32)  # above 1.0
    for _ in range(30):
        middle = low + (high - low) // 2
        kept = weights >= tl.cast(middle, tl.float32, bitcast=True)
        if COUNT:
            enough = tl.sum(kept.to(tl.int32), axis=0) >= wanted
        else:
            enough = tl.sum(tl.where(kept, weights.to(tl.float64), 0.0), axis=0) >= wanted
        low = tl.where(enough & (high - low > 1), middle, low)
        high = tl.where(enough, high, middle)
    return tl.cast(low, tl.float32, bitcast=True)


@triton.jit
def _threshold(logits, largest, scale, floor, wanted, V: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr):
    """The same of a whole row: eight thresholds in a pass."""
    low = tl.cast(floor, tl.int32, bitcast=True)
    high = tl.full((), 0x3F800001, tl.int32)
    places = tl.arange(0, 8)
    while high - low > 1:
        width = (high - low + 7) // 8
        tried = tl.minimum(low + (places + 1) * width, high - 1)
        least = tl.cast(tried, tl.float32, bitcast=True)
        total = tl.zeros((8, BLOCK), tl.float32)
        for start in range(0, V, BLOCK):
            at = start + tl.arange(0, BLOCK)
            values = tl.load(logits + at, mask=at < V, other=float("-inf")).to(tl.float32)
            weights = _weigh(values, at < V, largest, scale)
            kept = (weights[None, :] >= least[:, None]) & (at < V)[None, :]
            if COUNT:
                total += tl.where(kept, 1.0, 0.0)
            else:
                total += tl.where(kept, weights[None, :], 0.0)
        enough = tl.sum(total, axis=1).to(tl.float64) >= wanted
        below = tl.max(tl.where(enough, tried, low), axis=0)
        high = tl.min(tl.where(enough, high, tried), axis=0)
        low = below
    return tl.cast(low, tl.float32, bitcast=True)


@triton.jit
def _row_sums(logits, largest, scale, least, V: tl.constexpr, PLACES: tl.constexpr):
    """For each place the sum over the blocks of the weights that are at least ``least``."""
    total = tl.zeros((PLACES,), tl.float64)
    for start in range(0, V, PLACES):
        at = start + tl.arange(0, PLACES)
        values = tl.load(logits + at, mask=at < V, other=float("-inf")).to(tl.float32)
        weights = _weigh(values, at < V, largest, scale)
        total += tl.where(weights >= least, weights, 0.0).to(tl.float64)
    return total


@triton.jit
def _inside(
    logits, place, largest, scale, least, uniform, pair,
    V: tl.constexpr, LEVELS: tl.constexpr, HAS_SLOTS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """The token that is drawn among those of a place, one of each block."""
    at = place + PLACES * tl.arange(0, 8**LEVELS)
    values = tl.load(logits + at, mask=at < V, other=float("-inf")).to(tl.float32)
    weights = _weigh(values, at < V, largest, scale)
    kept = tl.where(weights >= least, weights, 0.0).to(tl.float64)
    return place + PLACES * _descend(kept, uniform, pair, 4, LEVELS, HAS_SLOTS)


@triton.jit
def _gather(logits, bound, values_at, tokens_at, V: tl.constexpr, BLOCK: tl.constexpr, CANDIDATES: tl.constexpr):
    """Stores the logits that are at least ``bound``, and their tokens, in order; returns how many there are."""
    count = tl.full((), 0, tl.int32)
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(logits + at, mask=at < V, other=float("-inf")).to(tl.float32)
        hit = (values >= bound) & (values > float("-inf"))
        more = tl.sum(hit.to(tl.int32), axis=0)
        if more > 0:
            to = count + tl.cumsum(hit.to(tl.int32), axis=0) - 1
            tl.store(values_at + to, values, mask=hit & (to < CANDIDATES))
            tl.store(tokens_at + to, at, mask=hit & (to < CANDIDATES))
            count += more
    tl.debug_barrier()
    return count


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def _draw_kernel(
    logits, rows, slots, positions, temperature, top_k, top_p, min_p, seed, uniform, maxima, places, sums,
    found_values, found_tokens, greedy, tokens, stride, step,
    V: tl.constexpr, BLOCKS: tl.constexpr, LEVELS: tl.constexpr, CANDIDATES: tl.constexpr, HAS_ROWS: tl.constexpr,
    HAS_SLOTS: tl.constexpr, PLACES: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    index = tl.program_id(0)
    row, setting = index.to(tl.int64), index.to(tl.int64)
    if HAS_ROWS:
        row = tl.load(rows + index)
    pair = tl.full((), 0, tl.uint64)
    if HAS_SLOTS:
        setting = tl.load(slots + index)
    parts = tl.arange(0, PARTS)
    largest_of = tl.load(maxima + index * PARTS + parts)
    first_of = tl.load(places + index * PARTS + parts)
    largest = tl.max(largest_of, axis=0)
    broken = tl.max((largest_of != largest_of).to(tl.int32), axis=0) > 0
    hopeless = broken | (tl.abs(largest) == float("inf"))
    likeliest = tl.min(tl.where(largest_of == largest, first_of, V - 1), axis=0)
    likeliest = tl.where(hopeless, -1, likeliest)
    if HAS_SLOTS:
        tl.store(greedy + index, likeliest.to(tl.int64))
    token = likeliest
    heat = tl.load(temperature + setting * step).to(tl.float32)
    if (heat > 0.0) & (hopeless == 0):
        logits += row * stride
        scale = 1.0 / heat
        if HAS_SLOTS:
            golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
            own = tl.cast(tl.load(seed + setting * step), tl.uint64, bitcast=True)
            pair = _mix(own + golden) + (tl.load(positions + index) + 2).to(tl.uint64) * golden  # the next position
        else:
            uniform += index * (4 + LEVELS)
        k = tl.load(top_k + setting * step)
        p = tl.load(top_p + setting * step).to(tl.float64)
        least_weight = tl.load(min_p + setting * step).to(tl.float32)
        some = (k < V) | (p < 1.0)
        part_sums = tl.load(sums + index * PARTS + parts)
        part_sums = tl.where(
            largest_of > float("-inf"), part_sums * tl.exp((largest_of - largest) * scale).to(tl.float64), 0.0
        )
        width: tl.constexpr = PLACES // PARTS
        if some | (least_weight > 0.0):
            # Every part but the largest K has its largest logit below ``bound``, so K tokens at least are not.
            reached = tl.sum((largest_of[None, :] >= largest_of[:, None]).to(tl.int32), axis=1)
            bound = tl.max(tl.where(reached >= tl.minimum(k, PARTS), largest_of, float("-inf")), axis=0)
            values_at, tokens_at = found_values + index * CANDIDATES, found_tokens + index * CANDIDATES
            count = _gather(logits, bound, values_at, tokens_at, V, PLACES, CANDIDATES)
            some_of = tl.arange(0, CANDIDATES)
            values = tl.load(values_at + some_of, mask=some_of < count, other=float("-inf"))
            numbers = tl.load(tokens_at + some_of, mask=some_of < count, other=0)
            weights = _weigh(values, some_of < count, largest, scale)
            wanted = p * tl.sum(part_sums, axis=0)
            mass = tl.sum(weights.to(tl.float64), axis=0)
            weakest = tl.exp((bound - largest) * scale)
            holds = tl.where(k < V, count >= k, tl.where(p < 1.0, mass >= wanted, weakest <= least_weight))
            least = largest * 0.0
            if (count <= CANDIDATES) & holds:
                if k < V:
                    least = _threshold_among(weights, least, k.to(tl.int32), True)
                    wanted = p * tl.sum(tl.where(weights >= least, weights.to(tl.float64), 0.0), axis=0)
                if p < 1.0:
                    least = _threshold_among(weights, least, wanted, False)
                kept = tl.where(weights >= tl.maximum(least, least_weight), weights.to(tl.float64), 0.0)
                token = _among(numbers, kept, uniform, pair, LEVELS, HAS_SLOTS, PLACES)
            else:
                if k < V:
                    least = _threshold(logits, largest, scale, least, k.to(tl.float64), V, PLACES // 2, True)
                    wanted = p * tl.sum(_row_sums(logits, largest, scale, least, V, PLACES), axis=0)
                if p < 1.0:
                    least = _threshold(logits, largest, scale, least, wanted, V, PLACES // 2, False)
                least = tl.maximum(least, least_weight)
                sums_of = _row_sums(logits, largest, scale, least, V, PLACES)
                place = _descend(sums_of, uniform, pair, 0, 4, HAS_SLOTS)
                token = _inside(logits, place, largest, scale, least, uniform, pair, V, LEVELS, HAS_SLOTS, PLACES)
        else:
            part = _descend(part_sums, uniform, pair, 0, 2, HAS_SLOTS)
            at = PLACES * tl.arange(0, BLOCKS)[:, None] + part * width + tl.arange(0, width)[None, :]
            read = tl.load(logits + at, mask=at < V, other=float("-inf")).to(tl.float32)
            columns = tl.sum(_weigh(read, at < V, largest, scale).to(tl.float64), axis=0)
            place = part * width + _descend(columns, uniform, pair, 2, 2, HAS_SLOTS)
            token = _inside(logits, place, largest, scale, 0.0, uniform, pair, V, LEVELS, HAS_SLOTS, PLACES)
        token = tl.minimum(token, V - 1)
    if HAS_SLOTS == 0:
        token = tl.maximum(token, 0)
    tl.store(tokens + index, token.to(tl.int64))


def sample_rows(logits: Tensor, largest: Tensor, batch: SamplingBatch) -> Tensor:
    """A token of each of the S rows that are sampled, int64 [S]; in a row that holds a NaN, or nothing to choose, any token.

    Args:
        logits: [R, V] of any float dtype, rows contiguous; not changed.
        largest: Not used: the kernels find each row's largest logit themselves.
        batch: The rows' settings.
    """
    settings = batch.temperature, batch.top_k, batch.top_p, batch.min_p
    return _draw(logits, batch.count, batch.rows, settings, None, None, None, batch.uniform)[1]


def draw_rows(logits: Tensor, settings: Tensor, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Computes ``cpu_sampling.draw_rows``. Rows of ``logits`` are contiguous."""
    floats = settings.view(torch.float64)
    given = floats[:, 0], settings[:, 1], floats[:, 2], floats[:, 3]
    return _draw(logits, len(logits), None, given, settings[:, SETTINGS - 1], slots, positions, None)


def _draw(
    logits: Tensor,
    count: int,
    rows: Tensor | None,
    settings: tuple[Tensor, Tensor, Tensor, Tensor],
    seeds: Tensor | None,
    slots: Tensor | None,
    positions: Tensor | None,
    uniform: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Each row's likeliest token, if it has slots, and its token."""
    width, device = logits.shape[1], logits.device
    maxima = torch.empty((count, _PARTS), dtype=torch.float32, device=device)
    places = torch.empty((count, _PARTS), dtype=torch.int32, device=device)
    sums = torch.empty((count, _PARTS), dtype=torch.float64, device=device)
    values = torch.empty((count, _CANDIDATES), dtype=torch.float32, device=device)
    numbers = torch.empty((count, _CANDIDATES), dtype=torch.int32, device=device)
    greedy = torch.empty(count, dtype=torch.int64, device=device)
    tokens = torch.empty(count, dtype=torch.int64, device=device)
    temperature, top_k, top_p, min_p = settings
    row, slot, step = (logits if each is None else each for each in (rows, slots, positions))
    shape = {
        "V": width, "BLOCKS": triton.next_power_of_2(triton.cdiv(width, PLACES)), "HAS_ROWS": rows is not None,
        "HAS_SLOTS": slots is not None, "PLACES": PLACES, "PARTS": _PARTS,
    }  # fmt: skip
    options = dependent_launch.options(logits)
    _part_kernel[(count, _PARTS)](
        logits, row, slot, temperature, maxima, places, sums, logits.stride(0), temperature.stride(0), **shape,
        num_warps=4, **options,
    )  # fmt: skip
    _draw_kernel[(count,)](
        logits, row, slot, step, temperature, top_k, top_p, min_p, logits if seeds is None else seeds,
        logits if uniform is None else uniform, maxima, places, sums, values, numbers, greedy, tokens, logits.stride(0),
        temperature.stride(0), **shape, LEVELS=block_levels(width), CANDIDATES=_CANDIDATES, num_warps=_WARPS, **options,
    )  # fmt: skip
    return greedy, tokens
