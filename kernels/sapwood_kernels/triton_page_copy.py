"""Triton: copies of whole pages within the device pool, and between it and pinned host memory.

:func:`store_pages` and :func:`load_pages` access host memory through its mapping into the device's address space, in one launch
for each layer: a page of a layer is one contiguous piece on both sides, usually 16 to 128 KiB. Few programs
stride over the pieces: a few hundred KiB in flight fill the link, and the other multiprocessors continue computing. Bound: the
link between host and device; each byte crosses it once. :func:`gather_pages` collects pages within device memory for the copy
engines.
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
    pages, host, device_pages, host_pages, count, host_stride, host_start,
    WORDS: tl.constexpr, BLOCK: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (WORDS + BLOCK - 1) // BLOCK
    tile = tl.program_id(0)
    while tile < count * blocks:
        item = tile // blocks
        words = tile % blocks * BLOCK + tl.arange(0, BLOCK)
        mask = words < WORDS
        device_at = pages + tl.load(device_pages + item) * WORDS + words
        host_at = host + tl.load(host_pages + item) * host_stride + host_start + words
        if STORE:
            tl.store(host_at, tl.load(device_at, mask=mask), mask=mask)
        else:
            tl.store(device_at, tl.load(host_at, mask=mask), mask=mask)
        tile += tl.num_programs(0)


@triton.jit
def _gather(pools, staged, pages, stride, start, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    item = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    words = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = words < WORDS
    pool = tl.load(pools + part).to(tl.pointer_type(tl.int32))
    content = tl.load(pool + tl.load(pages + item) * WORDS + words, mask=mask)
    tl.store(staged + item * stride + start + part * WORDS + words, content, mask=mask)


@triton.jit
def _copy_within(pools, sources, targets, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    item = tl.program_id(0).to(tl.int64)
    words = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = words < WORDS
    pool = tl.load(pools + tl.program_id(1)).to(tl.pointer_type(tl.int32))
    content = tl.load(pool + tl.load(sources + item) * WORDS + words, mask=mask)
    tl.store(pool + tl.load(targets + item) * WORDS + words, content, mask=mask)


def copy_pages(pools: Tensor, words: int, sources: Tensor, targets: Tensor) -> None:
    """Copies pages of several pools to other pages of the same pools, in one launch; asynchronous on the current stream. Its
    reference is ``reference.copy_pages``.

    Args:
        pools: int64 [layers]: the addresses of contiguous pools of pages, all of one page size.
        words: Words of a page of one pool.
        sources: int64 [N], on the device.
        targets: int64 [N], on the device, each once, none of them a source.
    """
    if len(sources):
        _copy_within[(len(sources), len(pools), triton.cdiv(words, _BLOCK))](
            pools, sources, targets, WORDS=words, BLOCK=_BLOCK, num_warps=8
        )


def store_pages(
    pages: Tensor, host: Tensor, start: int, device_pages: Tensor, host_pages: Tensor, programs: int = PROGRAMS
) -> None:
    """Copies pages of one layer to the host; asynchronous on the current stream. Its reference is ``reference.store_pages``.

    Args:
        pages: The layer's pages, contiguous.
        host: int32 [Q, words of a host page], pinned.
        start: Where in a host page the layer begins, in words.
        device_pages: int64 [N], on the device.
        host_pages: int64 [N], on the device.
        programs: Programs that copy.
    """
    _launch(pages, host, start, device_pages, host_pages, programs, store=True)


def load_pages(
    pages: Tensor, host: Tensor, start: int, device_pages: Tensor, host_pages: Tensor, programs: int = PROGRAMS
) -> None:
    """Copies pages of one layer from the host; the arguments are those of :func:`store_pages`, its reference ``load_pages``."""
    _launch(pages, host, start, device_pages, host_pages, programs, store=False)


def gather_pages(pools: Tensor, staged: Tensor, start: int, words: int, pages: Tensor) -> None:
    """Collects pages of several pools, page by page. Asynchronous on the current stream.

    Args:
        pools: int64 [parts]: the addresses of contiguous pools of pages, all of one page size.
        staged: int32 [N, words of a host page]; mutated from ``start`` on.
        start: Where the first pool's words go.
        words: Words of a page of one pool.
        pages: int64 [N].
    """
    assert staged.is_contiguous() and len(pages) == len(staged)
    if len(pages):
        _gather[(len(pages), len(pools), triton.cdiv(words, _BLOCK))](
            pools, staged, pages, staged.shape[1], start, WORDS=words, BLOCK=_BLOCK, num_warps=8
        )


def _launch(
    pages: Tensor, host: Tensor, start: int, device_pages: Tensor, host_pages: Tensor, programs: int, *, store: bool
) -> None:
    words = pages[0].numel() * pages.element_size() // 4
    assert pages.is_contiguous() and host.dtype == torch.int32
    assert pages[0].numel() * pages.element_size() % 4 == 0, "a page is not whole words"
    count = len(device_pages)
    if not count:
        return
    _copy[(min(programs, count * triton.cdiv(words, _BLOCK)),)](
        pages.view(torch.int32), host, device_pages, host_pages, count, host.stride(0), start,
        WORDS=words, BLOCK=_BLOCK, STORE=store, num_warps=4,
    )  # fmt: skip
