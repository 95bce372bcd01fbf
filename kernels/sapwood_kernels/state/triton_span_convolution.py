"""Triton: the causal convolution of prompts, from and to the windows in their slots, with what stands before and behind it.

Two launches: the outputs of all chunks at once, but for those that read a window; then what concerns windows, by span: the
outputs of its first tokens, and the windows behind its pieces. Bound: reads and writes each number once.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from sapwood_kernels.state.spans import CHUNK, Spans

_TOKENS = 16
_CHANNELS = 128


@dataclass(frozen=True, slots=True)
class Heads:
    """How channels lie in a row where heads are side by side, and in a head its queries, keys, values, and what is not read.

    Attributes:
        heads: Their number.
        keys: Channels of a head's queries, and of its keys.
        values: Channels of a head's values.
        width: Numbers of a head.
    """

    heads: int
    keys: int
    values: int
    width: int


@triton.jit
def _place(columns, HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, WIDTH: tl.constexpr):
    """Where channels (all queries, all keys, all values) lie in a row; HEADS is 0 if they lie in order."""
    places = columns
    if HEADS > 0:
        of_key = columns - HEADS * KEYS
        of_value = of_key - HEADS * KEYS
        query = columns // KEYS * WIDTH + columns % KEYS
        key = of_key // KEYS * WIDTH + KEYS + of_key % KEYS
        value = of_value // VALUES * WIDTH + 2 * KEYS + of_value % VALUES
        places = tl.where(columns < HEADS * KEYS, query, tl.where(columns < 2 * HEADS * KEYS, key, value))
    return places


@triton.jit
def _input(x, at, columns, live, C, stride, GATED: tl.constexpr):
    """The convolution's inputs; with a gate before, the product of the first and the third part of a row."""
    value = tl.load(x + at * stride + columns, mask=live, other=0.0)
    if GATED:
        value = value * tl.load(x + at * stride + 2 * C + columns, mask=live, other=0.0)
    return value.to(tl.float32)


@triton.jit
def _output(total, x, rows, columns, live, C, stride, GATED: tl.constexpr, SILU: tl.constexpr):
    """What becomes of the convolution's sums: SiLU, or the product with the second part of a row."""
    if SILU:
        total = total * tl.sigmoid(total)
    if GATED:
        total = total * tl.load(x + rows * stride + C + columns, mask=live, other=0.0)
    return total


@triton.jit
def _convolve_kernel(
    x, weight, bias, out, spans, chunks, C, stride,
    TAPS: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    table = chunks + 3 * tl.program_id(0)
    begin, end, span = tl.load(table), tl.load(table + 1), tl.load(table + 2)
    first = tl.load(spans + 5 * span + 1) + TAPS - 1
    columns = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    places = _place(columns, HEADS, KEYS, VALUES, WIDTH)
    inside = columns < C
    tokens = (begin + tl.program_id(2) * TOKENS + tl.arange(0, TOKENS))[:, None]
    live = (tokens >= first) & (tokens < end) & inside
    rows = tokens.to(tl.int64)
    total = tl.zeros((TOKENS, BLOCK), tl.float32)
    if BIAS:
        total += tl.load(bias + columns, mask=inside, other=0.0)
    for tap in tl.static_range(TAPS):
        value = _input(x, rows + (tap - TAPS + 1), places, live, C, stride, GATED)
        total += value * tl.load(weight + tap * C + columns, mask=inside, other=0.0)
    total = _output(total, x, rows, columns, live, C, stride, GATED, SILU)
    tl.store(out + rows * C + columns, total.to(out.dtype.element_ty), mask=live)


@triton.jit
def _ends_kernel(
    x, states, weight, bias, out, spans, pieces, C, stride, state_stride,
    TAPS: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    table = spans + 5 * tl.program_id(0)
    slot, first, piece, last = tl.load(table), tl.load(table + 1), tl.load(table + 2), tl.load(table + 3)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    places = _place(columns, HEADS, KEYS, VALUES, WIDTH)
    inside = columns < C
    window = states + slot.to(tl.int64) * state_stride + columns * (TAPS - 1)
    begin, behind = first.to(tl.int64), tl.load(pieces + 2 * last - 2)
    for token in tl.static_range(TAPS - 1):
        live = columns < tl.where(begin + token < behind, C, 0)
        total = tl.zeros((BLOCK,), tl.float32)
        if BIAS:
            total += tl.load(bias + columns, mask=inside, other=0.0)
        for tap in tl.static_range(TAPS):
            if token + tap < TAPS - 1:
                value = tl.load(window + token + tap, mask=live, other=0.0)
            else:
                value = _input(x, begin + (token + tap - TAPS + 1), places, live, C, stride, GATED)
            total += value * tl.load(weight + tap * C + columns, mask=inside, other=0.0)
        total = _output(total, x, begin + token, columns, live, C, stride, GATED, SILU)
        tl.store(out + (begin + token) * C + columns, total.to(out.dtype.element_ty), mask=live)
    tl.debug_barrier()  # threads that hold the same numbers have read them
    while piece < last:
        end, target = tl.load(pieces + 2 * piece), tl.load(pieces + 2 * piece + 1)
        into = states + target.to(tl.int64) * state_stride + columns * (TAPS - 1)
        # A thread shifts a channel's window: each number moves to where one was that has been read already.
        for tap in tl.static_range(TAPS - 1):
            at = tl.full((BLOCK,), 0, tl.int64) + (end + tap - TAPS + 1)
            value = _input(x, at, places, inside & (at >= first), C, stride, GATED)
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
    heads: Heads | None = None,
) -> None:
    """Convolves the tokens of spans, and advances their windows.

    Args:
        x: [T, C], its rows contiguous; or [T, 3 C] with ``gated``: b, c and x side by side; or as ``heads`` says.
        states: float32 [slots, numbers]: a slot begins with its window, [C, K - 1]. Written in place.
        spans: Which tokens.
        weight: float32 [C, K], contiguous.
        bias: float32 [C]; None: there is none.
        out: [T, C], contiguous: the spans' tokens are written.
        silu: Whether SiLU follows.
        gated: Whether ``c * convolution(b * x)`` is computed.
        heads: Where channels lie in a row; None: in order.
    """
    channels, taps = weight.shape
    lying = (0, 1, 1, 1) if heads is None else (heads.heads, heads.keys, heads.values, heads.width)
    sizes = dict(zip(("HEADS", "KEYS", "VALUES", "WIDTH"), lying, strict=True))
    sizes |= {"TAPS": taps, "GATED": gated, "SILU": silu, "BIAS": bias is not None, "num_warps": 4}
    by_tap = weight.t().contiguous()  # neighbours then read neighbours
    _convolve_kernel[(len(spans.chunks), triton.cdiv(channels, _CHANNELS), CHUNK // _TOKENS)](
        x, by_tap, bias, out, spans.spans, spans.chunks, channels, x.stride(0), TOKENS=_TOKENS, BLOCK=_CHANNELS, **sizes
    )
    _ends_kernel[(len(spans.spans), triton.cdiv(channels, 256))](
        x,
        states,
        by_tap,
        bias,
        out,
        spans.spans,
        spans.pieces,
        channels,
        x.stride(0),
        states.stride(0),
        BLOCK=256,
        **sizes,
    )
