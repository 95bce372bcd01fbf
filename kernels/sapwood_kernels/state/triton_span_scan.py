"""Triton: linear recurrences of prompts in chunks: the state space of Mamba 2, lightning attention, the gated delta rule.

With a head's state S [keys, values] before a chunk, the chunk's queries q, keys k, written values u, sums G of the logarithms of
decays, and G' the last of these:

    out = e^G q S + ((q k') * e^(G_i - G_j), j <= i) u,   S <- e^G' S + (e^(G' - G) k)' u

The delta rule's u depend on S: ``inverse`` times (v - e^G k S), as ``triton_span_inverse`` has it. Elsewhere u is v. A program
takes a head of a span, and some of its values, through all chunks, with the state in registers: it reads and writes the state
once, and each snapshot of it once. Queries and keys are read again for each block of values, by programs that run at the same
time. Sums are float32; products are of the dtype of the inputs.

Source: Dao and Gu, "Transformers are SSMs", 2024; Yang et al., "Gated Delta Networks", 2024.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from sapwood_kernels.state.spans import CHUNK, Spans
from sapwood_kernels.state.triton_math import chunk_decays


@triton.jit
def _scan_kernel(
    q, k, v, decay, q_factors, k_factors, inverse, skip, states, spans, pieces, out,
    q_stride, q_head, k_stride, k_head, v_stride, v_head, out_stride, state_stride, key_stride, value_stride, decay_stride, HEADS,
    SHARED: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr, Q_FACTORS: tl.constexpr, K_FACTORS: tl.constexpr, DELTA: tl.constexpr, SKIP: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    table = spans + 5 * tl.program_id(2)
    slot, begin, piece, last = tl.load(table), tl.load(table + 1), tl.load(table + 2), tl.load(table + 3)
    head = tl.program_id(1)
    key_head = head // SHARED
    steps = tl.arange(0, CHUNK)
    keys = tl.arange(0, BLOCK_K)
    values = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_keys, in_values = keys < KEYS, values < VALUES
    at_state = head * (KEYS * VALUES) + keys[:, None] * key_stride + values[None, :] * value_stride
    in_state = in_keys[:, None] & in_values[None, :]
    state = tl.load(states + slot.to(tl.int64) * state_stride + at_state, mask=in_state, other=0.0)
    q += key_head * q_head
    k += key_head * k_head
    v += head * v_head
    out += head * VALUES
    skipped = 0.0
    if SKIP:
        skipped = tl.load(skip + head)
    dtype = v.dtype.element_ty
    while piece < last:
        end, target = tl.load(pieces + 2 * piece), tl.load(pieces + 2 * piece + 1)
        for start in tl.range(begin, end, CHUNK, num_stages=STAGES):
            live = start + steps < end
            tokens = (start + steps).to(tl.int64)
            per_key, per_value = live[:, None] & in_keys[None, :], live[:, None] & in_values[None, :]
            ks = tl.load(k + tokens[:, None] * k_stride + keys[None, :], mask=per_key, other=0.0)
            qs = tl.load(q + tokens[:, None] * q_stride + keys[None, :], mask=per_key, other=0.0)
            vs = tl.load(v + tokens[:, None] * v_stride + values[None, :], mask=per_value, other=0.0)
            logs = tl.load(decay + tokens * decay_stride + head, mask=live, other=0.0)
            since, tail, whole, left = chunk_decays(logs, steps)
            known = state.to(dtype)
            if K_FACTORS:
                k_factor = tl.load(k_factors + tokens * HEADS + head, mask=live, other=0.0)
                left *= k_factor[None, :]
                tail *= k_factor
            if DELTA:
                solve = tl.load(
                    inverse + (tokens[:, None] * HEADS + head) * CHUNK + steps[None, :], mask=live[:, None], other=0.0
                )
                seen = tl.dot(ks, known, input_precision=PRECISION) * (since * k_factor)[:, None]
                u = tl.dot(solve, (vs.to(tl.float32) - seen).to(dtype), input_precision=PRECISION)
            else:
                u = vs.to(tl.float32)
            near = tl.dot(qs, tl.trans(ks), input_precision=PRECISION) * left
            result = tl.dot(qs, known, input_precision=PRECISION) * since[:, None]
            result += tl.dot(near.to(dtype), u.to(dtype), input_precision=PRECISION)
            if Q_FACTORS:
                q_factor = tl.load(q_factors + tokens * HEADS + head, mask=live, other=0.0)
                result *= q_factor[:, None]
            if SKIP:
                result += skipped * vs.to(tl.float32)
            tl.store(
                out + tokens[:, None] * out_stride + values[None, :], result.to(out.dtype.element_ty), mask=per_value
            )
            state *= whole
            state += tl.dot(tl.trans(ks), (u * tail[:, None]).to(dtype), input_precision=PRECISION)
        tl.store(states + target.to(tl.int64) * state_stride + at_state, state, mask=in_state)
        begin = end
        piece += 1


@dataclass(frozen=True, slots=True)
class Tile:
    """How the work is cut.

    Attributes:
        values: Of a state's values that a program takes, at most.
        warps: Of a program.
        stages: Chunks whose reads are under way, at least two: with one, Triton 3.6 gave wrong numbers and wrote elsewhere.
        chunk: Tokens that are computed together; the delta rule's are those of its inverses, :data:`CHUNK`.
    """

    values: int
    warps: int
    stages: int
    chunk: int = CHUNK

    def __post_init__(self) -> None:
        assert self.stages > 1, "a tile needs two stages"


TILE = Tile(32, 4, 2)
"""What is used where nothing was measured."""
TILES: dict[tuple[bool, int, int], tuple[Tile, Tile]] = {
    (True, 128, 128): (Tile(32, 4, 3), Tile(64, 4, 2)),
    (False, 128, 64): (Tile(64, 4, 3), Tile(64, 4, 2)),
    (False, 128, 128): (Tile(64, 4, 3), Tile(64, 4, 2)),
}
"""Whether it is the delta rule, keys, values -> the tiles that bench_state_kernels.py found the fastest on an H200: where
programs are at most :data:`WAVE`, and where they are more."""
WAVE = 132
"""Multiprocessors of an H200."""


def tile_of(delta: bool, keys: int, values: int, states: int) -> Tile:
    """How the work of so many heads of spans is cut."""
    few, many = TILES.get((delta, keys, values), (TILE, TILE))
    return few if states * triton.cdiv(values, few.values) <= WAVE else many


@dataclass(frozen=True, slots=True)
class Delta:
    """What the delta rule needs besides: what ``triton_span_inverse.inverses`` returns."""

    inverse: Tensor
    q_factors: Tensor
    k_factors: Tensor


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    states: Tensor,
    spans: Spans,
    out: Tensor,
    *,
    key_major: bool,
    step: Tensor | None = None,
    delta: Delta | None = None,
    skip: Tensor | None = None,
    precision: str = "tf32",
    tile: Tile | None = None,
) -> None:
    """Takes spans through their states.

    Args:
        q, k: [T, G, K], the last dimension contiguous; H is a multiple of G.
        v: [T, H, V], the last dimension contiguous; of the dtype of q and k.
        decay: float32 [T, H], at most 0: the logarithm of each step's factor; a row may be all tokens' (stride 0).
        states: float32 [slots, H * K * V], its rows apart as they may be: a head's state after the other's. Written in place.
        spans: Which tokens.
        out: [T, H, V], contiguous: the spans' tokens are written.
        key_major: Whether a head's state is [K, V]; else it is [V, K].
        step: float32 [T, H], contiguous: what each token's v is multiplied by when it is written; None: 1.
        delta: Of the delta rule; None: what is written is v. ``step`` is None with it.
        skip: float32 [H]: out gets so many v; None: none.
        precision: Of products of float32, as ``tl.dot`` takes it.
        tile: How the work is cut; None: as is known to be fast.
    """
    heads, values = v.shape[1:]
    groups, keys = k.shape[1:]
    tile = tile or tile_of(delta is not None, keys, values, heads * len(spans.spans))
    block = max(16, min(tile.values, triton.next_power_of_2(values)))
    key_stride, value_stride = (values, 1) if key_major else (1, keys)
    k_factors = step if delta is None else delta.k_factors
    _scan_kernel[(triton.cdiv(values, block), heads, len(spans.spans))](
        q, k, v, decay, None if delta is None else delta.q_factors, k_factors, None if delta is None else delta.inverse, skip,
        states, spans.spans, spans.pieces, out,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), heads * values, states.stride(0),
        key_stride, value_stride, decay.stride(0), heads,
        SHARED=heads // groups, KEYS=keys, VALUES=values, BLOCK_K=max(16, triton.next_power_of_2(keys)), BLOCK_V=block,
        CHUNK=tile.chunk, Q_FACTORS=delta is not None, K_FACTORS=k_factors is not None, DELTA=delta is not None,
        SKIP=skip is not None, PRECISION=precision, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
