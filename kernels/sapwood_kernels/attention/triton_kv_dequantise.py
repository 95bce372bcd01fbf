"""Triton: widens pages of a float8 cache into a buffer of the model's dtype, for attention kernels that cannot read float8.

One program copies a few tokens' heads of a page. Bound: reads one byte and writes two for each element.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit(do_not_specialize_on_alignment=["pages"])  # decodes of the step name theirs before
def _widen_kernel(
    keys, values, pages, key_out, value_out, key_scale, value_scale, stride, WORDS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    item = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WORDS
    source = tl.load(pages + item).to(tl.int64) * stride + at
    target = item * WORDS + at
    key = tl.load(keys + source, mask=inside, other=0.0).to(tl.float32) * key_scale
    tl.store(key_out + target, key.to(key_out.dtype.element_ty), mask=inside)
    value = tl.load(values + source, mask=inside, other=0.0).to(tl.float32) * value_scale
    tl.store(value_out + target, value.to(value_out.dtype.element_ty), mask=inside)


def dequantise_pages(
    key_pages: Tensor,
    value_pages: Tensor,
    pages: Tensor,
    key_out: Tensor,
    value_out: Tensor,
    scales: tuple[float, float],
) -> None:
    """Writes ``key_pages[pages] * scales[0]`` and ``value_pages[pages] * scales[1]`` to the first pages of the outputs.

    Args:
        key_pages: float8_e4m3fn [P, page_size, K, D], each page contiguous in any order.
        value_pages: The same for values.
        pages: int32 [N].
        key_out: [at least N, page_size, K, D] in the same order, of a wider dtype; mutated.
        value_out: The same for values.
        scales: The factors of keys and of values.
    """
    words = key_pages[0].numel()
    assert key_pages.stride()[1:] == key_out.stride()[1:] and key_out.stride(0) == words, "the buffer lies differently"
    assert key_pages.stride() == value_pages.stride(), "keys and values lie differently"
    block = min(_BLOCK, triton.next_power_of_2(words))
    grid = (len(pages), triton.cdiv(words, block))
    _widen_kernel[grid](
        key_pages, value_pages, pages, key_out, value_out, *scales, key_pages.stride(0), WORDS=words, BLOCK=block, num_warps=4
    )  # fmt: skip
