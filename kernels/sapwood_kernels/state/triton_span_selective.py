"""Triton: the state space of Mamba 1 over prompts: a state's numbers decay each by a rate of its own.

Three launches: each chunk by itself, from zeros, to the state that it adds and the sum of its steps; the states before all
chunks, one after another, since a chunk leaves exp(rate * sum) of what was there; and the outputs of each chunk from the state
before it. A program takes some channels of a chunk, with their state in registers, one token after another. Bound: the
exponentials, two for each token, channel and number of a state.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sapwood_kernels.state.spans import CHUNK, Spans

_TOKENS = 8
"""Tokens whose inputs are read together."""
_CHANNELS = 32
"""Those of a program: each thread of a warp has one, with all its numbers."""
_LOG2E = tl.constexpr(1.4426950408889634)  # powers of two are computed


@triton.jit
def _tokens(
    x, step, b, c, out, begin, end, state, rates, skipped, channels, inside, numbers, C, b_stride, c_stride,
    NUMBERS: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, OUTPUT: tl.constexpr,
):  # fmt: skip
    """Takes a state [N, C] through a chunk, with outputs if wanted; returns it and the sum of the steps."""
    total = tl.zeros((CHANNELS,), tl.float32)
    steps = tl.arange(0, TOKENS)[:, None]
    for start in range(begin, end, TOKENS):
        results = tl.zeros((TOKENS, CHANNELS), tl.float32)
        for at in tl.static_range(TOKENS):
            is_live = start + at < end  # behind the end a step is 0: the state stays
            live, read = channels < tl.where(is_live, C, 0), numbers < tl.where(is_live, NUMBERS, 0)
            row = begin.to(tl.int64) + (start - begin + at)
            own = tl.load(x + row * C + channels, mask=live, other=0.0).to(tl.float32)
            move = tl.load(step + row * C + channels, mask=live, other=0.0)
            bs = tl.load(b + row * b_stride + numbers, mask=read, other=0.0).to(tl.float32)
            total += move
            state = tl.exp2(move[None, :] * rates) * state + (move * own)[None, :] * bs[:, None]
            if OUTPUT:
                cs = tl.load(c + row * c_stride + numbers, mask=read, other=0.0).to(tl.float32)
                result = tl.sum(state * cs[:, None], axis=0) + skipped * own
                results = tl.where(steps == at, result[None, :], results)
        if OUTPUT:
            mask = (start + steps < end) & inside[None, :]
            tl.store(out + (start + steps).to(tl.int64) * C + channels[None, :], results, mask=mask)
    return state, total


@triton.jit
def _chunk_kernel(
    x, step, decay, b, c, skip, out, chunks, between, totals, C, b_stride, c_stride,
    NUMBERS: tl.constexpr, BLOCK_N: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
    OUTPUT: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(1)
    begin, end = tl.load(chunks + 3 * chunk), tl.load(chunks + 3 * chunk + 1)
    numbers = tl.arange(0, BLOCK_N)
    channels = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channels < C
    at_rate = channels[None, :] * NUMBERS + numbers[:, None]
    in_state = inside[None, :] & (numbers < NUMBERS)[:, None]
    rates = tl.load(decay + at_rate, mask=in_state, other=0.0) * _LOG2E
    # Between kernels a chunk's state is [N, C]: neighbouring threads then write neighbours.
    at_state = between + (chunk.to(tl.int64) * NUMBERS + numbers[:, None]) * C + channels[None, :]
    if OUTPUT:
        state = tl.load(at_state, mask=in_state, other=0.0)
        skipped = tl.load(skip + channels, mask=inside, other=0.0)
    else:
        state = tl.zeros((BLOCK_N, CHANNELS), tl.float32)
        skipped = tl.zeros((CHANNELS,), tl.float32)
    state, total = _tokens(
        x, step, b, c, out, begin, end, state, rates, skipped, channels, inside, numbers, C, b_stride, c_stride,
        NUMBERS, TOKENS, CHANNELS, OUTPUT,
    )  # fmt: skip
    if not OUTPUT:
        tl.store(at_state, state, mask=in_state)
        tl.store(totals + chunk.to(tl.int64) * C + channels, total, mask=inside)


@triton.jit
def _between_kernel(
    decay, states, spans, pieces, between, totals, C, state_stride,
    NUMBERS: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Replaces what each chunk adds by the state before it, and writes the states behind pieces."""
    table = spans + 5 * tl.program_id(1)
    slot, begin, piece, last = tl.load(table), tl.load(table + 1), tl.load(table + 2), tl.load(table + 3)
    chunk = tl.load(table + 4).to(tl.int64)
    numbers = tl.arange(0, BLOCK_N)
    channels = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channels < C
    at_state = channels[None, :] * NUMBERS + numbers[:, None]
    in_state = inside[None, :] & (numbers < NUMBERS)[:, None]
    state = tl.load(states + slot.to(tl.int64) * state_stride + at_state, mask=in_state, other=0.0)
    rates = tl.load(decay + at_state, mask=in_state, other=0.0) * _LOG2E
    while piece < last:
        end, target = tl.load(pieces + 2 * piece), tl.load(pieces + 2 * piece + 1)
        for _ in range(begin, end, CHUNK):
            at = between + (chunk * NUMBERS + numbers[:, None]) * C + channels[None, :]
            added = tl.load(at, mask=in_state, other=0.0)
            total = tl.load(totals + chunk * C + channels, mask=inside, other=0.0)
            tl.store(at, state, mask=in_state)
            state = tl.exp2(total[None, :] * rates) * state + added
            chunk += 1
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
    count, blocks = len(spans.chunks), triton.cdiv(channels, _CHANNELS)
    between = torch.empty(count, numbers, channels, dtype=torch.float32, device=x.device)
    totals = torch.empty(count, channels, dtype=torch.float32, device=x.device)
    sizes = {"NUMBERS": numbers, "BLOCK_N": triton.next_power_of_2(numbers), "CHANNELS": _CHANNELS, "num_warps": 1}

    def of_chunks(*, output: bool) -> None:
        _chunk_kernel[(blocks, count)](
            x, step, decay, b, c, skip, out, spans.chunks, between, totals, channels, b.stride(0), c.stride(0), TOKENS=_TOKENS,
            OUTPUT=output, **sizes,
        )  # fmt: skip

    of_chunks(output=False)
    _between_kernel[(blocks, len(spans.spans))](
        decay, states, spans.spans, spans.pieces, between, totals, channels, states.stride(0), CHUNK=CHUNK, **sizes
    )  # fmt: skip
    of_chunks(output=True)
