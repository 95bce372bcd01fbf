"""Triton: the step that attention over keys and values in pages consists of, one block of keys taken into a running softmax."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


def window_code(window: int | None, chunked: bool) -> int:
    """The constant ``WINDOW`` of kernels: a window's length, that of chunks as a negative number, 0 where all keys are seen."""
    return 0 if window is None else -window if chunked else window


@triton.jit
def oldest_seen(position, WINDOW: tl.constexpr):
    """The first key that a token at a position sees, not below 0; ``WINDOW`` is not 0."""
    return position // -WINDOW * -WINDOW if WINDOW < 0 else tl.maximum(position - WINDOW + 1, 0)


@triton.jit
def attend_block(
    q, keys, values, own, at, end, oldest, newest, page_stride, slot_stride, highest, total, result, scale, cap,
    D: tl.constexpr, PAGE: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of keys and values, taken into each row's maximum, sum and result; scores are in powers of 2.

    With ``MASKED``, rows see keys before ``end``, with ``CAUSAL`` up to their ``newest`` one; with ``WINDOWED``, from their
    ``oldest`` one on.
    """
    columns = tl.arange(0, BLOCK_D)
    tokens = at + tl.arange(0, BLOCK)
    there = tokens < end
    page = tl.load(own + tokens // PAGE, mask=there, other=0).to(tl.int64)
    offsets = page * page_stride + tokens % PAGE * slot_stride
    # Memory beyond the end was never written. It is not read, because zero times NaN is NaN.
    inside = there[:, None] & (columns < D)[None, :]
    k = tl.load(keys + offsets[:, None] + columns[None, :], mask=inside, other=0.0).to(q.dtype)
    v = tl.load(values + offsets[:, None] + columns[None, :], mask=inside, other=0.0).to(q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if CAPPED:
        scores = cap * (2.0 * tl.sigmoid(2.0 * scores / cap) - 1.0)  # tanh
    if MASKED:
        seen = tokens[None, :] <= newest[:, None] if CAUSAL else there[None, :]
        if WINDOWED:
            seen = seen & (tokens[None, :] >= oldest[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    above = tl.maximum(highest, tl.max(scores, axis=1))
    # A row that has seen no key yet has no maximum.
    base = tl.where(above == float("-inf"), 0.0, above) if MASKED and (CAUSAL or WINDOWED) else above
    weights = tl.exp2(scores - base[:, None])
    fade = tl.exp2(highest - base)
    result = result * fade[:, None] + tl.dot(weights.to(q.dtype), v, input_precision="ieee")
    return above, total * fade + tl.sum(weights, axis=1), result
