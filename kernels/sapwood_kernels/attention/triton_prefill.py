"""Triton: attention of ragged chunks of prompts over the paged cache, which already holds the chunks' own keys and values.

Algorithm (FlashAttention-2; Dao, 2023): a program takes a tile of consecutive tokens of one request with all query heads that
share a key/value head, so that keys are read once for the group, and goes through the keys that the tile sees with a running
maximum and sum. A tile reads no key beyond its last token, and with a window none before its first token's. Blocks of keys that
every token of the tile sees need no mask; they come first. Tiles are launched longest first.

Cost: T^2 / 2 products a head without a window, T (window + tile) with one. Bound: products.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from sapwood_kernels.attention.triton_block import LOG2_E, attend_block, oldest_seen, window_code

_LEAST_ROWS = 16  # the fewest rows of a matrix unit's product
_TILE_BYTES = 32768  # of a tile's queries, and of a block's keys and values: fits in 99 KiB of shared memory
_HOPPER = (9, 0)  # which has 227


class AlikeTile(NamedTuple):
    """What a program takes where results are the same for all tiles of a model.

    Attributes:
        rows: Rows of a tile, as :func:`tile_rows` says.
        keys: Keys of a block.
        stages: As :func:`key_blocks` says.
    """

    rows: int
    keys: int
    stages: int


@triton.jit(do_not_specialize_on_alignment=["pages"])  # decodes of the step name theirs before
def _prefill_kernel(
    query, keys, values, tiles, starts, indptr, lengths, pages, sinks, out, sums, scale, value_scale, softcap, heads,
    page_stride, slot_stride, head_stride,
    GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    SINKS: tl.constexpr, SUMS: tl.constexpr, FLOAT8: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, ALIKE: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    request, first = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    start = tl.load(starts + request)
    count = tl.load(starts + request + 1) - start
    length = tl.load(lengths + request)
    own = pages + tl.load(indptr + request)
    keys += head * head_stride
    values += head * head_stride
    rows, columns = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    token = first + rows // GROUP
    wanted = ((rows < TOKENS * GROUP) & (token < count))[:, None] & (columns < D)[None, :]
    head_rows = (start + token).to(tl.int64) * heads + head * GROUP + rows % GROUP
    places = head_rows[:, None] * D + columns[None, :]
    q = tl.load(query + places, mask=wanted, other=0.0)
    if FLOAT8:
        q = q.to(tl.float16)
    before = length - count + first  # the position of the tile's first token
    newest = length - count + token
    oldest = oldest_seen(newest, WINDOW) if WINDOW != 0 else newest
    end = tl.minimum(before + TOKENS, length) if CAUSAL else length
    scale *= LOG2_E
    cap = softcap * LOG2_E
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if SINKS:  # a key without a value, that every token sees
        highest = tl.load(sinks + head * GROUP + rows % GROUP) * LOG2_E
        total += 1.0
    result = tl.zeros((ROWS, BLOCK_D), tl.float32)
    at = oldest_seen(before, WINDOW) if WINDOW != 0 else 0
    # Without a window all tokens of the tile see the keys up to its first token's; or all of them.
    whole = at if WINDOW != 0 else (before + 1 if CAUSAL else length) // BLOCK * BLOCK
    if ALIKE:  # blocks begin at the same keys for all tiles, and are all computed as those with a mask
        at = at // BLOCK * BLOCK
        whole = at
    if STAGES > 0:
        if WINDOW == 0:
            for block in tl.range(at, whole, BLOCK, num_stages=STAGES):
                highest, total, result = attend_block(
                    q, keys, values, own, block, end, oldest, newest, page_stride, slot_stride, highest, total, result,
                    scale, cap, D, PAGE, False, True, WINDOW != 0, CAPPED, BLOCK_D, BLOCK,
                )  # fmt: skip
        for block in tl.range(whole, end, BLOCK, num_stages=STAGES):
            highest, total, result = attend_block(
                q, keys, values, own, block, end, oldest, newest, page_stride, slot_stride, highest, total, result, scale, cap,
                D, PAGE, True, CAUSAL, WINDOW != 0, CAPPED, BLOCK_D, BLOCK,
            )  # fmt: skip
    else:  # Triton's interpreter cannot run such loops
        while at < whole:
            highest, total, result = attend_block(
                q, keys, values, own, at, end, oldest, newest, page_stride, slot_stride, highest, total, result, scale, cap,
                D, PAGE, False, True, WINDOW != 0, CAPPED, BLOCK_D, BLOCK,
            )  # fmt: skip
            at += BLOCK
        while at < end:
            highest, total, result = attend_block(
                q, keys, values, own, at, end, oldest, newest, page_stride, slot_stride, highest, total, result, scale, cap,
                D, PAGE, True, CAUSAL, WINDOW != 0, CAPPED, BLOCK_D, BLOCK,
            )  # fmt: skip
            at += BLOCK
    result = result / tl.where(total == 0.0, 1.0, total)[:, None] * value_scale
    tl.store(out + places, result.to(out.dtype.element_ty), mask=wanted)
    if SUMS:
        tl.store(sums + head_rows, highest + tl.log2(total), mask=(rows < TOKENS * GROUP) & (token < count))


def tile_tokens(group: int, dim: int, dtype: torch.dtype) -> int:
    """Tokens of a tile, whose rows are these tokens' heads of one group."""
    return tile_rows(group, dim, dtype) // group


def tile_rows(group: int, dim: int, dtype: torch.dtype) -> int:
    """Rows of a tile, a power of 2.

    Args:
        group: Query heads that share a key/value head.
        dim: Elements of a head.
        dtype: The queries' dtype.
    """
    rows: int = min(max(_TILE_BYTES // _row_bytes(dim, dtype), _LEAST_ROWS), 128)
    return max(rows, int(triton.next_power_of_2(group)))


def key_blocks(dim: int, dtype: torch.dtype, capability: tuple[int, int]) -> tuple[int, int]:
    """Keys of a block, a power of 2, and Triton's stages.

    A block's pages are loaded a stage before its keys, so that five stages have two blocks under way besides the one in use,
    and two or three have none: 401 TFLOP/s on an H200, with 64 keys and two stages 318.

    Args:
        dim, dtype: As :func:`tile_rows` takes them.
        capability: The device's.
    """
    if capability == _HOPPER and dtype.itemsize == 2 and dim <= 128:
        return 128, 5
    return min(max(_TILE_BYTES // (2 * _row_bytes(dim, dtype)), 16), 64), 2


def _row_bytes(dim: int, dtype: torch.dtype) -> int:
    elements: int = triton.next_power_of_2(dim)
    return elements * dtype.itemsize


def num_warps(rows: int) -> int:
    """Warps of a program whose tile has this many rows."""
    return 8 if rows >= 128 else 4


def cut_tiles(
    query_lens: npt.NDArray[np.integer], seq_lens: npt.NDArray[np.integer], tokens: int
) -> npt.NDArray[np.int32]:
    """The tiles of a step, those that see the most keys first. O(tiles log tiles), no Python loop.

    Args:
        query_lens: [B]: tokens of each request in the step.
        seq_lens: [B]: keys of each request.
        tokens: Tokens of a tile.

    Returns:
        int32 [tiles, 2]: the request, and the first token of the tile among the request's tokens in the step.
    """
    counts = -(-query_lens // tokens)
    request = np.repeat(np.arange(len(counts)), counts)
    first = (np.arange(len(request)) - np.repeat(np.cumsum(counts) - counts, counts)) * tokens
    order = np.argsort(-(seq_lens - query_lens)[request] - first, kind="stable")
    return np.stack((request, first), 1)[order].astype(np.int32)


def prefill_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    tiles: Tensor,
    starts: Tensor,
    indptr: Tensor,
    pages: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    window: int | None = None,
    chunked: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kv_scales: tuple[float, float] = (1.0, 1.0),
    out: Tensor | None = None,
    causal: bool = True,
    sums: Tensor | None = None,
    alike: AlikeTile | None = None,
) -> Tensor:
    """Computes ``reference.paged_attention``; does not wait for the device.

    Args:
        query: [T, H, D], contiguous: the requests' tokens one after the other.
        key_pages: [P, S, K, D] in any order except that D is last, of the query's dtype or float8_e4m3fn.
        value_pages: The same, in the same order, for values.
        tiles: int32 [tiles, 2], as :func:`cut_tiles` gives them for :func:`tile_tokens`.
        starts: int32 [B + 1]: request i's tokens are rows ``starts[i]`` .. ``starts[i + 1] - 1``.
        indptr: int32 [B + 1]: request i's pages begin at ``pages[indptr[i]]``.
        pages: int32, page ids.
        lengths: int32 [B]: keys of each request, its own tokens included.
        scale, window, chunked, softcap, sinks: As in ``reference.attention``.
        kv_scales: Factors of the stored keys and values.
        out: [T, H, D], contiguous: the result is written here; None: to a new tensor.
        causal: Whether the tokens are the last ones of their request, and see the tokens before them; else they see all of its
            keys (at least one), without a window.
        sums: float32 [T, H]: gets the logarithms, to base 2, of the sums of weights.
        alike: The tile with which a token's result is the same to the bit wherever in a tile it stands; None: by shape and
            device, and results may differ by rounding.

    Returns:
        [T, H, D].
    """
    assert causal or window is None
    heads, dim = query.shape[1:]
    page_size, kv_heads = key_pages.shape[1:3]
    assert key_pages.stride() == value_pages.stride() and key_pages.stride(3) == 1, "keys and values lie differently"
    group = heads // kv_heads
    out = torch.empty_like(query) if out is None else out
    rows = tile_rows(group, dim, query.dtype) if alike is None else alike.rows
    capability = torch.cuda.get_device_capability(query.device) if query.is_cuda else (0, 0)
    block, stages = key_blocks(dim, query.dtype, capability) if alike is None else (alike.keys, alike.stages)
    _prefill_kernel[(len(tiles), kv_heads)](
        query, key_pages, value_pages, tiles, starts, indptr, lengths, pages, query if sinks is None else sinks, out,
        out if sums is None else sums, scale * kv_scales[0], kv_scales[1], softcap or 1.0, heads, *key_pages.stride()[:3],
        GROUP=group, D=dim, PAGE=page_size, CAUSAL=causal, WINDOW=window_code(window, chunked), CAPPED=softcap is not None,
        SINKS=sinks is not None, SUMS=sums is not None, FLOAT8=key_pages.dtype == torch.float8_e4m3fn,
        TOKENS=rows // group, ROWS=rows,
        BLOCK_D=max(16, triton.next_power_of_2(dim)), BLOCK=block,
        STAGES=stages if query.is_cuda else 0, ALIKE=alike is not None, num_warps=num_warps(rows),
    )  # fmt: skip
    return out
