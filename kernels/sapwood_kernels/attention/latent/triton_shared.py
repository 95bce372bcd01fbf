"""Triton: decodes of several requests attend to latent vectors that all of them share; a vector is read once for many requests.

As ``triton_shared``, whose items it takes: a program has a stretch of the run, a block of heads, and as many requests as fill the
rows of its products. Its result is a part of each request's result, joined with the part that ``triton_decode`` reads for the
request alone. Nothing of it has been measured on a GPU yet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sapwood_kernels.attention.triton_block import LOG2_E

HEADS_OF_BLOCK = 16
"""Heads of a program: the fewest rows of a matrix unit's product."""
_REQUESTS, _KEYS_OF_BLOCK, _STAGES = 4, 32, 2
_ROOMY = ((8, 0), (9, 0), (10, 0), (10, 3))
"""Compute capabilities with at least 163 KiB of shared memory for a program: the others have one request in each."""


@triton.jit
def _latent_block(
    q, turned, stored, own, at, end, page_stride, slot_stride, highest, total, result, scale,
    R: tl.constexpr, E: tl.constexpr, PAGE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of vectors, taken into the running maximum, sum and result; scores are in powers of 2."""
    columns, ends = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_E)
    tokens = at + tl.arange(0, BLOCK)
    there = tokens < end
    page = tl.load(own + tokens // PAGE, mask=there, other=0).to(tl.int64)
    vectors = stored + (page * page_stride + tokens % PAGE * slot_stride)[:, None]
    # Memory beyond the end was never written. It is not read, because zero times NaN is NaN.
    latent = tl.load(vectors + columns[None, :], mask=there[:, None] & (columns < R)[None, :], other=0.0).to(q.dtype)
    rotary = tl.load(vectors + R + ends[None, :], mask=there[:, None] & (ends < E)[None, :], other=0.0).to(q.dtype)
    scores = tl.dot(q, tl.trans(latent), input_precision="ieee")
    scores = tl.dot(turned, tl.trans(rotary), scores, input_precision="ieee") * scale
    scores = tl.where(there[None, :], scores, float("-inf"))
    above = tl.maximum(highest, tl.max(scores, axis=1))
    weights = tl.exp2(scores - above[:, None])
    fade = tl.exp2(highest - above)
    result = result * fade[:, None] + tl.dot(weights.to(q.dtype), latent, input_precision="ieee")
    return above, total * fade + tl.sum(weights, axis=1), result


@triton.jit
def attend_latent(
    q, turned, stored, own, at, end, page_stride, slot_stride, scale,
    R: tl.constexpr, E: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The partial result of rows over the vectors from ``at`` to ``end``: the highest score, the sum of weights, the weighted
    sum."""
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    result = tl.zeros((ROWS, BLOCK_R), tl.float32)
    if STAGES > 0:
        for block in tl.range(at, end, BLOCK, num_stages=STAGES):
            highest, total, result = _latent_block(
                q, turned, stored, own, block, end, page_stride, slot_stride, highest, total, result, scale,
                R, E, PAGE, BLOCK_R, BLOCK_E, BLOCK,
            )  # fmt: skip
    else:  # Triton's interpreter cannot run such loops
        while at < end:
            highest, total, result = _latent_block(
                q, turned, stored, own, at, end, page_stride, slot_stride, highest, total, result, scale,
                R, E, PAGE, BLOCK_R, BLOCK_E, BLOCK,
            )  # fmt: skip
            at += BLOCK
    return highest, total, result


@triton.jit(do_not_specialize=["first_slot", "slots_of_row"])
def _shared_latent_kernel(
    query, stored, indptr, pages, order, items, part, sums, scale, value_scale, page_stride, slot_stride, first_slot,
    slots_of_row,
    HEADS: tl.constexpr, R: tl.constexpr, E: tl.constexpr, PAGE: tl.constexpr, FIELDS: tl.constexpr, FLOAT8: tl.constexpr,
    HEADS_HERE: tl.constexpr, ROWS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    items += tl.program_id(1) * FIELDS
    members = tl.load(items + 1)
    if members > 0:
        rows, columns, ends = tl.arange(0, ROWS), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_E)
        member, head = rows // HEADS_HERE, tl.program_id(0) * HEADS_HERE + rows % HEADS_HERE
        there = (member < members) & (head < HEADS)
        request = tl.load(order + tl.load(items) + member, mask=member < members, other=0)
        own = pages + tl.load(indptr + tl.load(items + 2))
        at, end = tl.load(items + 3), tl.load(items + 4)
        head_rows = request * HEADS + head
        wanted = there[:, None] & (columns < R)[None, :]
        queries = query + head_rows[:, None] * (R + E)
        q = tl.load(queries + columns[None, :], mask=wanted, other=0.0)
        turned = tl.load(queries + R + ends[None, :], mask=there[:, None] & (ends < E)[None, :], other=0.0)
        if FLOAT8:
            q, turned = q.to(tl.float16), turned.to(tl.float16)
        scale *= LOG2_E
        highest, total, result = attend_latent(
            q, turned, stored, own, at, end, page_stride, slot_stride, scale, R, E, PAGE, ROWS, BLOCK_R, BLOCK_E, BLOCK, STAGES,
        )  # fmt: skip
        result = result / total[:, None] * value_scale
        slots = head_rows * slots_of_row + first_slot + tl.load(items + 5)
        tl.store(part + slots[:, None] * R + columns[None, :], result, mask=wanted)
        tl.store(sums + slots, highest + tl.log2(total), mask=there)


def requests_of(capability: tuple[int, int]) -> int:
    """Requests of a program on a GPU of this compute capability."""
    return _REQUESTS if capability in _ROOMY else 1


def warps_of(requests: int) -> int:
    """Warps of a program with this many requests: its result lies in their registers."""
    return 8 if requests > 1 else 4


def tile_requests(device: torch.device) -> int:
    """Requests of a program on this device."""
    return requests_of(torch.cuda.get_device_capability(device)) if device.type == "cuda" else _REQUESTS


def attend_shared_latent(
    query: Tensor,
    stored: Tensor,
    rank: int,
    indptr: Tensor,
    pages: Tensor,
    order: Tensor,
    items: Tensor,
    part: Tensor,
    sums: Tensor,
    first_slot: int,
    *,
    scale: float,
    kv_scale: float,
) -> None:
    """Writes the parts of the items to ``part`` and ``sums``; does not wait for the device.

    Args:
        query, stored, rank, indptr, pages, scale, kv_scale: As in ``triton_decode.latent_decode``.
        order, items, first_slot: As in ``triton_shared.attend_shared``; items of at most :func:`tile_requests` requests.
        part: float32 [B * H, S, R].
        sums: float32 [B * H, S]: the logarithms, to base 2, of the sums of weights.
    """
    heads, dim = query.shape[1:]
    requests = tile_requests(query.device)
    block_r, block_e = (max(16, triton.next_power_of_2(size)) for size in (rank, dim - rank))
    _shared_latent_kernel[(triton.cdiv(heads, HEADS_OF_BLOCK), len(items))](
        query, stored, indptr, pages, order, items, part, sums, scale * kv_scale, kv_scale, *stored.stride()[:2], first_slot,
        part.shape[1],
        HEADS=heads, R=rank, E=dim - rank, PAGE=stored.shape[1], FIELDS=items.shape[1],
        FLOAT8=stored.dtype == torch.float8_e4m3fn, HEADS_HERE=HEADS_OF_BLOCK, ROWS=requests * HEADS_OF_BLOCK, BLOCK_R=block_r,
        BLOCK_E=block_e, BLOCK=_KEYS_OF_BLOCK, STAGES=_STAGES if query.is_cuda else 0,
        num_warps=warps_of(requests),
    )  # fmt: skip
