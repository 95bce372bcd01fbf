"""Triton: copies of whole pages between the device pool and pinned host memory, one launch a layer.

The kernel reads or writes host memory itself, through its mapping into the device's address space: a page's keys (or values) of
a layer are one contiguous piece on both sides, usually 8 to 64 KiB, far too many pieces for a copy call each. Bound: the link
between host and device; each byte crosses it once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


@triton.jit
def _kernel(
    keys, values, host, device_pages, host_pages, host_stride, host_start,
    WORDS: tl.constexpr, BLOCK: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0)
    is_value = tl.program_id(1)
    words = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
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


def store_pages(
    keys: Tensor, values: Tensor, host: Tensor, layer: int, device_pages: Tensor, host_pages: Tensor
) -> None:
    """See ``reference.store_pages``; ``host`` is pinned, the page ids are on the device. Asynchronous on the current stream."""
    _launch(keys, values, host, layer, device_pages, host_pages, store=True)


def load_pages(
    keys: Tensor, values: Tensor, host: Tensor, layer: int, device_pages: Tensor, host_pages: Tensor
) -> None:
    """See ``reference.load_pages``; ``host`` is pinned, the page ids are on the device. Asynchronous on the current stream."""
    _launch(keys, values, host, layer, device_pages, host_pages, store=False)


def _launch(
    keys: Tensor, values: Tensor, host: Tensor, layer: int, device_pages: Tensor, host_pages: Tensor, *, store: bool
) -> None:
    words = keys[0].numel() * keys.element_size() // 4
    assert keys.is_contiguous() and values.is_contiguous() and host[0].is_contiguous()
    assert keys[0].numel() * keys.element_size() % 4 == 0, "a page's keys are not whole words"
    count = len(device_pages)
    if not count:
        return
    _kernel[(count, 2, triton.cdiv(words, _BLOCK))](
        keys.view(torch.int32), values.view(torch.int32), host.view(torch.int32), device_pages, host_pages,
        host.stride(0) * host.element_size() // 4, layer * 2 * words,
        WORDS=words, BLOCK=_BLOCK, STORE=store, num_warps=4,
    )  # fmt: skip
