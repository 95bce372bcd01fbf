"""Triton: decodes of several requests attend to a run of keys that all of them share; a key is read once for many requests.

A program takes an item (``items``): a stretch of keys, and up to ``tile_requests`` requests, whose query heads of one
key/value head are the rows of its products. Its result is a part of each request's result. Other parts are those of the
stretches that ``triton_decode`` reads for the request alone; its merging kernel adds them all up. The grid has a fixed number of
items, so that it can be captured in a graph; those that are not needed end at once.

Cost: the run is read once for each ``ROWS / GROUP`` requests, and from the second time on it mostly lies in the L2 cache; with
many requests the products are what binds, as in prefill. Nothing of it waits for the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sapwood_kernels.attention.triton_block import LOG2_E, attend_block, oldest_seen, window_code

_FEW_ROWS, _ROWS, _MANY_ROWS = 16, 64, 128
"""Rows of a program's products: the fewest that a matrix unit takes, and those that four warps take in one product and in two.
Each is a kernel to compile."""
_MOST_NUMBERS = 16384
"""Numbers of a program's result: what the registers of its warps hold."""
_ROOMY = ((8, 0), (9, 0), (10, 0), (10, 3))
"""Compute capabilities with at least 163 KiB of shared memory for a program."""


@triton.jit(do_not_specialize=["first_slot", "slots_of_row"], do_not_specialize_on_alignment=["pages"])
def _shared_kernel(
    query, keys, values, indptr, lengths, pages, order, items, part, sums, scale, value_scale, softcap, page_stride, slot_stride,
    head_stride, first_slot, slots_of_row,
    GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, FIELDS: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, FLOAT8: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    heads = tl.num_programs(0) * GROUP
    items += tl.program_id(1) * FIELDS
    members = tl.load(items + 1)
    if members > 0:
        rows, columns = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
        there = rows // GROUP < members
        request = tl.load(order + tl.load(items) + rows // GROUP, mask=there, other=0)
        own = pages + tl.load(indptr + tl.load(items + 2))
        at, end = tl.load(items + 3), tl.load(items + 4)
        oldest = tl.zeros((ROWS,), tl.int32)
        if WINDOW != 0:
            # Pages that no request sees any more may be gone.
            oldest = oldest_seen(tl.load(lengths + request, mask=there, other=2147483647) - 1, WINDOW)
            at = tl.maximum(at, tl.min(oldest, axis=0))
        wanted = there[:, None] & (columns < D)[None, :]
        head_rows = request * heads + head * GROUP + rows % GROUP
        q = tl.load(query + head_rows[:, None] * D + columns[None, :], mask=wanted, other=0.0)
        if FLOAT8:
            q = q.to(tl.float16)
        keys += head * head_stride
        values += head * head_stride
        scale *= LOG2_E
        cap = softcap * LOG2_E
        highest = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        result = tl.zeros((ROWS, BLOCK_D), tl.float32)
        if STAGES > 0:
            for block in tl.range(at, end, BLOCK, num_stages=STAGES):
                highest, total, result = attend_block(
                    q, keys, values, own, block, end, oldest, end, page_stride, slot_stride, highest, total, result, scale, cap,
                    D, PAGE, True, False, WINDOW != 0, CAPPED, BLOCK_D, BLOCK,
                )  # fmt: skip
        else:  # Triton's interpreter cannot run such loops
            while at < end:
                highest, total, result = attend_block(
                    q, keys, values, own, at, end, oldest, end, page_stride, slot_stride, highest, total, result, scale, cap,
                    D, PAGE, True, False, WINDOW != 0, CAPPED, BLOCK_D, BLOCK,
                )  # fmt: skip
                at += BLOCK
        empty = total == 0.0
        result = result / tl.where(empty, 1.0, total)[:, None] * value_scale
        slots = head_rows * slots_of_row + first_slot + tl.load(items + 5)
        tl.store(part + slots[:, None] * D + columns[None, :], result, mask=wanted)
        tl.store(
            sums + slots, tl.where(empty, float("-inf"), highest + tl.log2(tl.where(empty, 1.0, total))), mask=there
        )


def tile_rows(group: int, dim: int, batch: int) -> int:
    """Rows of a program's products: query heads that share a key head; each request has ``group`` of them."""
    rows: int = max(_FEW_ROWS, triton.next_power_of_2(group))
    for more in (_ROWS, _MANY_ROWS):
        if rows < batch * group and more * triton.next_power_of_2(dim) <= _MOST_NUMBERS:
            rows = max(rows, more)
    return rows


def tile_keys(dim: int) -> int:
    """Keys of a block: what fits in the shared memory of GPUs that have little."""
    return 64 if dim <= 128 else 32


def tile_pipeline(rows: int, capability: tuple[int, int]) -> tuple[int, int]:
    """Blocks of keys that are under way, and warps: 3 and 4 took an H200 38 us where 2 and 8 took 54 (64 requests, 8192 keys)."""
    if capability in _ROOMY:
        return 3, 4
    return 2, 8 if rows >= _MANY_ROWS else 4


def tile_requests(group: int, dim: int, batch: int) -> int:
    """Requests of a program."""
    return tile_rows(group, dim, batch) // group


def attend_shared(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    indptr: Tensor,
    pages: Tensor,
    lengths: Tensor,
    order: Tensor,
    items: Tensor,
    part: Tensor,
    sums: Tensor,
    first_slot: int,
    *,
    scale: float,
    window: int | None,
    chunked: bool,
    softcap: float | None,
    kv_scales: tuple[float, float],
) -> None:
    """Writes the parts of the items to ``part`` and ``sums``; does not wait for the device.

    Args:
        query, key_pages, value_pages, indptr, pages, lengths, scale, window, chunked, softcap, kv_scales: As in
            ``triton_decode.decode_attention``.
        order: int32 [B], as :class:`SharedRuns` has it.
        items: int32 [N, FIELDS], as :class:`SharedItems` has them; those with no requests are skipped.
        part: float32 [B * H, S, D].
        sums: float32 [B * H, S]: the logarithms, to base 2, of the sums of weights.
        first_slot: The place in S of the items' slot 0.
    """
    batch, heads, dim = query.shape
    page_size, kv_heads = key_pages.shape[1:3]
    group = heads // kv_heads
    rows = tile_rows(group, dim, batch)
    stages, warps = tile_pipeline(rows, torch.cuda.get_device_capability(query.device)) if query.is_cuda else (0, 4)
    _shared_kernel[(kv_heads, len(items))](
        query, key_pages, value_pages, indptr, lengths, pages, order, items, part, sums, scale * kv_scales[0], kv_scales[1],
        softcap or 1.0, *key_pages.stride()[:3], first_slot, part.shape[1],
        GROUP=group, D=dim, PAGE=page_size, FIELDS=items.shape[1], WINDOW=window_code(window, chunked),
        CAPPED=softcap is not None, FLOAT8=key_pages.dtype == torch.float8_e4m3fn, ROWS=rows,
        BLOCK_D=max(16, triton.next_power_of_2(dim)), BLOCK=tile_keys(dim), STAGES=stages, num_warps=warps,
    )  # fmt: skip
