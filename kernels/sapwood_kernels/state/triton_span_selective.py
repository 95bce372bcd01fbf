"""Triton: the state space of Mamba 1 over prompts: a state's numbers decay each by a rate of its own, so tokens go one by one.

A program takes some channels of a span through all its tokens, with their state in registers. It reads a tile of tokens at
once, and waits for memory once a tile. Bound: the exponentials, one for each token, channel and number of a state.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sapwood_kernels.state.spans import Spans

_TOKENS = 16
_CHANNELS = 32


@triton.jit
def _selective_kernel(
    x, step, decay, b, c, skip, states, spans, pieces, out, C, b_stride, c_stride, state_stride,
    NUMBERS: tl.constexpr, BLOCK_N: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    table = spans + 4 * tl.program_id(1)
    slot, begin, piece, last = tl.load(table), tl.load(table + 1), tl.load(table + 2), tl.load(table + 3)
    steps = tl.arange(0, TOKENS)[:, None]
    numbers = tl.arange(0, BLOCK_N)
    channels = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channels < C
    at_state = channels[None, :] * NUMBERS + numbers[:, None]
    in_state = inside[None, :] & (numbers < NUMBERS)[:, None]
    state = tl.load(states + slot.to(tl.int64) * state_stride + at_state, mask=in_state, other=0.0)
    rates = tl.load(decay + at_state, mask=in_state, other=0.0) * 1.4426950408889634  # powers of two are computed
    skipped = tl.load(skip + channels, mask=inside, other=0.0)
    while piece < last:
        end, target = tl.load(pieces + 2 * piece), tl.load(pieces + 2 * piece + 1)
        for start in range(begin, end, TOKENS):
            live = start + steps < end
            rows = (start + steps).to(tl.int64)
            mask = live & inside[None, :]
            xs = tl.load(x + rows * C + channels[None, :], mask=mask, other=0.0).to(tl.float32)
            moves = tl.load(step + rows * C + channels[None, :], mask=mask, other=0.0)
            of_numbers = live & (numbers < NUMBERS)[None, :]
            bs = tl.load(b + rows * b_stride + numbers[None, :], mask=of_numbers, other=0.0).to(tl.float32)
            cs = tl.load(c + rows * c_stride + numbers[None, :], mask=of_numbers, other=0.0).to(tl.float32)
            result = skipped[None, :] * xs
            for at in tl.static_range(TOKENS):
                here = steps == at
                move = tl.sum(tl.where(here, moves, 0.0), axis=0)  # 0 behind the end: the state stays
                moved = move * tl.sum(tl.where(here, xs, 0.0), axis=0)
                bt, ct = tl.sum(tl.where(here, bs, 0.0), axis=0), tl.sum(tl.where(here, cs, 0.0), axis=0)
                state = tl.exp2(move[None, :] * rates) * state + moved[None, :] * bt[:, None]
                result += tl.where(here, tl.sum(state * ct[:, None], axis=0)[None, :], 0.0)
            tl.store(out + rows * C + channels[None, :], result, mask=mask)
        tl.store(states + target.to(tl.int64) * state_stride + at_state, state, mask=in_state)
        begin = end
        piece += 1


def selective_scan(
    x: Tensor,
    step: Tensor,
    decay: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    states: Tensor,
    spans: Spans,
    out: Tensor,
) -> None:
    """Takes spans through their states.

    Args:
        x: [T, C], contiguous.
        step: float32 [T, C], contiguous, at least 0.
        decay: float32 [C, N], contiguous, below 0.
        b, c: [T, N], their rows contiguous.
        skip: float32 [C]: out gets so much of x.
        states: float32 [slots, C * N], its rows apart as they may be. Written in place.
        spans: Which tokens.
        out: float32 [T, C], contiguous: the spans' tokens are written.
    """
    channels, numbers = decay.shape
    _selective_kernel[(triton.cdiv(channels, _CHANNELS), len(spans.spans))](
        x, step, decay, b, c, skip, states, spans.spans, spans.pieces, out, channels, b.stride(0), c.stride(0), states.stride(0),
        NUMBERS=numbers, BLOCK_N=triton.next_power_of_2(numbers), TOKENS=_TOKENS, CHANNELS=_CHANNELS, num_warps=1,
    )  # fmt: skip
