"""Triton: the causal convolution of prompts, from and to the windows in their slots, with what stands before and behind it.

Two launches: the outputs of all chunks at once, then the windows of each span, one after another, since an output of the span's
first tokens reads the window that its end replaces. Bound: reads and writes each number once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sapwood_kernels.state.spans import CHUNK, Spans

_TOKENS = 16
_CHANNELS = 256


@triton.jit
def _input(x, at, columns, live, C, stride, GATED: tl.constexpr):
    """The convolution's inputs; with a gate before, the product of the first and the third part of a row."""
    value = tl.load(x + at * stride + columns, mask=live, other=0.0)
    if GATED:
        value = value * tl.load(x + at * stride + 2 * C + columns, mask=live, other=0.0)
    return value.to(tl.float32)


@triton.jit
def _convolve_kernel(
    x, states, weight, bias, out, spans, chunks, C, stride, state_stride,
    TAPS: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    table = chunks + 3 * tl.program_id(0)
    begin, end, span = tl.load(table), tl.load(table + 1), tl.load(table + 2)
    slot, first = tl.load(spans + 4 * span), tl.load(spans + 4 * span + 1)
    columns = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = columns < C
    window = states + slot.to(tl.int64) * state_stride
    begin += tl.program_id(2) * TOKENS
    tokens = (begin + tl.arange(0, TOKENS))[:, None]
    live = (tokens < end) & inside
    rows = tokens.to(tl.int64)
    total = tl.zeros((TOKENS, BLOCK), tl.float32)
    if BIAS:
        total += tl.load(bias + columns, mask=inside, other=0.0)
    for tap in tl.static_range(TAPS):
        at = rows + (tap - TAPS + 1)
        value = _input(x, at, columns, live & (at >= first), C, stride, GATED)
        if begin - first < TAPS - 1:
            before = live & (at < first)
            value += tl.load(window + columns * (TAPS - 1) + at - first + TAPS - 1, mask=before, other=0.0)
        total += value * tl.load(weight + columns * TAPS + tap, mask=inside, other=0.0)
    if SILU:
        total = total * tl.sigmoid(total)
    if GATED:
        total = total * tl.load(x + rows * stride + C + columns, mask=live, other=0.0)
    tl.store(out + rows * C + columns, total.to(out.dtype.element_ty), mask=live)


@triton.jit
def _windows_kernel(
    x, states, spans, pieces, C, stride, state_stride, TAPS: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr
):
    table = spans + 4 * tl.program_id(0)
    slot, first, piece, last = tl.load(table), tl.load(table + 1), tl.load(table + 2), tl.load(table + 3)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < C
    window = states + slot.to(tl.int64) * state_stride + columns * (TAPS - 1)
    while piece < last:
        end, target = tl.load(pieces + 2 * piece), tl.load(pieces + 2 * piece + 1)
        into = states + target.to(tl.int64) * state_stride + columns * (TAPS - 1)
        # A thread shifts a channel's window: each number moves to where one was that has been read already.
        for tap in tl.static_range(TAPS - 1):
            at = tl.full((BLOCK,), 0, tl.int64) + (end + tap - TAPS + 1)
            value = _input(x, at, columns, inside & (at >= first), C, stride, GATED)
            value += tl.load(window + at - first + TAPS - 1, mask=inside & (at < first), other=0.0)
            tl.store(into + tap, value, mask=inside)
        piece += 1


def convolve(
    x: Tensor,
    states: Tensor,
    spans: Spans,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    silu: bool = False,
    gated: bool = False,
) -> None:
    """Convolves the tokens of spans, and advances their windows.

    Args:
        x: [T, C], its rows contiguous; or [T, 3 C] with ``gated``: b, c and x side by side.
        states: float32 [slots, numbers]: a slot begins with its window, [C, K - 1]. Written in place.
        spans: Which tokens.
        weight: float32 [C, K], contiguous.
        bias: float32 [C]; None: there is none.
        out: [T, C], contiguous: the spans' tokens are written.
        silu: Whether SiLU follows.
        gated: Whether ``c * convolution(b * x)`` is computed.
    """
    channels, taps = weight.shape
    sizes = {"TAPS": taps, "GATED": gated, "num_warps": 4}
    _convolve_kernel[(len(spans.chunks), triton.cdiv(channels, _CHANNELS), CHUNK // _TOKENS)](
        x, states, weight, bias, out, spans.spans, spans.chunks, channels, x.stride(0), states.stride(0),
        SILU=silu, BIAS=bias is not None, TOKENS=_TOKENS, BLOCK=_CHANNELS, **sizes,
    )  # fmt: skip
    _windows_kernel[(len(spans.spans), triton.cdiv(channels, 256))](
        x, states, spans.spans, spans.pieces, channels, x.stride(0), states.stride(0), BLOCK=256, **sizes
    )
