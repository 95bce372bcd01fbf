"""Triton: a request's keys and values out of their pages, one after the other, for attention kernels that know no pages.

A program copies a few tokens of a page, of keys and of values, in whatever order they are stored. Bound: reads and writes each
element once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


# The pages of a batch's second prompt lie anywhere: that would be another variant, compiled while it waits.
@triton.jit(do_not_specialize=["LENGTH"], do_not_specialize_on_alignment=["pages"])
def _gather_kernel(
    keys, values, pages, key_out, value_out, LENGTH, of_page, of_token, of_head, PAGE: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    page = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = page * PAGE
    token, head = at // (HEADS * DIM), at // DIM % HEADS
    # Places after the last token get 0: a page's rest may hold NaN, which times 0 is not 0.
    there = (at < PAGE * HEADS * DIM) & (first + token < LENGTH)
    place = tl.load(pages + tl.where(first < LENGTH, page, 0)).to(tl.int64) * of_page
    source = place + token * of_token + head * of_head + at % DIM
    target = first.to(tl.int64) * HEADS * DIM + at
    inside = at < PAGE * HEADS * DIM
    tl.store(key_out + target, tl.load(keys + source, mask=there, other=0.0), mask=inside)
    tl.store(value_out + target, tl.load(values + source, mask=there, other=0.0), mask=inside)


def gather(keys: Tensor, values: Tensor, pages: Tensor, length: int, room: int) -> tuple[Tensor, Tensor]:
    """A request's keys and values.

    Args:
        keys: [P, page_size, K, D] in any order except that D is last.
        values: The same, in the same order.
        pages: int32 [N]: those of the request.
        length: Its tokens.
        room: Tokens of the results, at least as many; those after the request's are 0.

    Returns:
        [room, K, D] each, contiguous but for what follows the last of them.
    """
    _, page, heads, dim = keys.shape
    assert keys.stride() == values.stride() and keys.stride(3) == 1, "keys and values lie differently"
    count = triton.cdiv(room, page)
    out = torch.empty(2, count * page, heads, dim, dtype=keys.dtype, device=keys.device)
    block = min(_BLOCK, triton.next_power_of_2(page * heads * dim))
    _gather_kernel[(count, triton.cdiv(page * heads * dim, block))](
        keys, values, pages, out[0], out[1], length, *keys.stride()[:3], PAGE=page, HEADS=heads, DIM=dim, BLOCK=block,
        num_warps=8,
    )  # fmt: skip
    return out[0, :room], out[1, :room]
