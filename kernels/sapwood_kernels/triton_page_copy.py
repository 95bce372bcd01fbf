"""Triton: copies of whole pages between the device pool and pinned host memory.

:func:`store_pages` and :func:`load_pages` access host memory through its mapping into the device's address space, in one launch
for each layer: a page's keys (or values) of a layer are one contiguous piece on both sides, usually 8 to 64 KiB. Few programs
stride over the pieces: a few hundred KiB in flight fill the link, and the other multiprocessors go on computing. Bound: the link
between host and device; each byte crosses it once. :func:`gather_pages` collects pages within device memory for the copy engines.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
PROGRAMS = 16
"""The default number of programs that copy: each has 16 KiB in flight, and together they fill a PCIe 5 link."""


@triton.jit(do_not_specialize=["count"])
def _copy(
    keys, values, host, device_pages, host_pages, count, host_stride, host_start,
    WORDS: tl.constexpr, BLOCK: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (WORDS + BLOCK - 1) // BLOCK
    tile = tl.program_id(0)
    while tile < count * 2 * blocks:
        item = tile // (2 * blocks)
        is_value = tile // blocks % 2
        words = tile % blocks * BLOCK + tl.arange(0, BLOCK)
        mask = words < WORDS
        device_at = tl.load(device_pages + item) * WORDS + words
        host_at = host + tl.load(host_pages + item) * host_stride + host_start + is_value * WORDS + words
        if STORE:
            if is_value == 0:
                tl.store(host_at, tl.load(keys + device_at, mask=mask), mask=mask)
            else:
                tl.store(host_at, tl.load(values + device_at, mask=mask), mask=mask)
        else:
            content = tl.load(host_at, mask=mask)
            if is_value == 0:
                tl.store(keys + device_at, content, mask=mask)
            else:
                tl.store(values + device_at, content, mask=mask)
        tile += tl.num_programs(0)


@triton.jit
def _gather(pools, staged, pages, PARTS: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    item = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    words = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = words < WORDS
    pool = tl.load(pools + part).to(tl.pointer_type(tl.int32))
    content = tl.load(pool + tl.load(pages + item) * WORDS + words, mask=mask)
    tl.store(staged + (item * PARTS + part) * WORDS + words, content, mask=mask)


def store_pages(
    keys: Tensor, values: Tensor, host: Tensor, layer: int, device_pages: Tensor, host_pages: Tensor,
    programs: int = PROGRAMS,
) -> None:  # fmt: skip
    """Does ``reference.store_pages``; ``host`` is pinned, the page ids are on the device. Asynchronous on the current stream."""
    _launch(keys, values, host, layer, device_pages, host_pages, programs, store=True)


def load_pages(
    keys: Tensor, values: Tensor, host: Tensor, layer: int, device_pages: Tensor, host_pages: Tensor,
    programs: int = PROGRAMS,
) -> None:  # fmt: skip
    """Does ``reference.load_pages``; ``host`` is pinned, the page ids are on the device. Asynchronous on the current stream."""
    _launch(keys, values, host, layer, device_pages, host_pages, programs, store=False)


def gather_pages(pools: Tensor, staged: Tensor, pages: Tensor) -> None:
    """Collects pages of several pools, page by page. Asynchronous on the current stream.

    Args:
        pools: int64 [parts]: the addresses of contiguous pools of pages, all of one page size.
        staged: int32 [N, parts, words of a page]; mutated.
        pages: int64 [N].
    """
    count, parts, words = staged.shape
    assert staged.is_contiguous() and len(pools) == parts and len(pages) == count
    if count:
        _gather[(count, parts, triton.cdiv(words, _BLOCK))](
            pools, staged, pages, PARTS=parts, WORDS=words, BLOCK=_BLOCK, num_warps=8
        )


def _launch(
    keys: Tensor, values: Tensor, host: Tensor, layer: int, device_pages: Tensor, host_pages: Tensor, programs: int,
    *, store: bool,
) -> None:  # fmt: skip
    words = keys[0].numel() * keys.element_size() // 4
    assert keys.is_contiguous() and values.is_contiguous() and host[0].is_contiguous()
    assert keys[0].numel() * keys.element_size() % 4 == 0, "a page's keys are not whole words"
    count = len(device_pages)
    if not count:
        return
    _copy[(min(programs, count * 2 * triton.cdiv(words, _BLOCK)),)](
        keys.view(torch.int32), values.view(torch.int32), host.view(torch.int32), device_pages, host_pages, count,
        host.stride(0) * host.element_size() // 4, layer * 2 * words,
        WORDS=words, BLOCK=_BLOCK, STORE=store, num_warps=4,
    )  # fmt: skip
