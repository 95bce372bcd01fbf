"""Triton: a linear layer on a few rows, 16-bit, with the gate or the sum after it in the same kernel.

As for a single row (``triton_gemv``) the time is that of reading every weight once. Each program streams a tile of the weight's
rows past all rows of the input, on tensor cores with the weight as the left side, so that hardly any of their work is padding.
Where the weight has too few rows to fill the chip, ``shares`` programs each take a part of the inputs; the last one to end adds
their sums, always in the same order, so that the result is the same each time. Where the kernel ahead leaves the memory idle, as
a sum over ranks does, its first weights come to the L2 cache meanwhile (``dependent_launch``).

Bound: one read of the weight, and of the input by each tile. O(N K).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sapwood_kernels import dependent_launch

Gate = Literal["silu", "gelu_tanh"]

_LEAST_ROWS = 16
"""The fewest columns of a tensor core's product that all of Triton's releases take."""


class Tile(NamedTuple):
    """What a program takes.

    Attributes:
        rows: Rows of the weight; with a gate as many again.
        columns: Inputs of a step of its loop.
        shares: Programs that share the inputs of these rows.
        warps: Of a program.
        stages: Steps whose weights are under way at once.
    """

    rows: int
    columns: int
    shares: int
    warps: int
    stages: int


TILES: dict[tuple[int, int], tuple[tuple[int, Tile], ...]] = {
    (28672, 4096): ((16, Tile(64, 128, 1, 4, 3)), (64, Tile(64, 64, 1, 4, 4))),
    (4096, 14336): ((16, Tile(64, 128, 2, 4, 5)), (32, Tile(64, 128, 2, 4, 4))),
    (4096, 4096): ((16, Tile(64, 128, 2, 4, 5)), (32, Tile(64, 128, 2, 4, 4))),
    (128256, 4096): ((16, Tile(128, 128, 1, 8, 3)), (32, Tile(64, 128, 1, 4, 4)), (64, Tile(128, 64, 1, 4, 4))),
    (14336, 8192): ((16, Tile(64, 128, 1, 8, 4)), (64, Tile(64, 128, 1, 4, 3))),
    (8192, 7168): ((16, Tile(32, 256, 1, 4, 5)),),
    (2560, 8192): ((16, Tile(64, 128, 2, 4, 5)), (32, Tile(64, 128, 4, 4, 4))),
    (8192, 2048): ((16, Tile(32, 256, 1, 4, 5)),),
    (32064, 8192): ((16, Tile(32, 256, 1, 4, 4)),),
    (2048, 4096): ((16, Tile(64, 128, 4, 4, 4)),),
    (3648, 2048): ((16, Tile(16, 256, 1, 4, 6)),),
    (2048, 2048): ((16, Tile(16, 256, 2, 4, 6)),),
}
"""[N, K] of a weight -> tiles, each with the most rows of the input that it is for. Measured on an H200 compared with cuBLAS
(``benchmarks/gpu/bench_few_rows.py``), which computes all other weights. These are those of an 8B of Llama's shape, but for its
queries, keys and values, where cuBLAS is as fast, those of a fourth of a 70B, and, on an H100 and behind a norm, Qwen3-30B-A3B's
output projection (9.9 us with the norm, cuBLAS 11.1) and DeepSeek-V2-Lite's two projections (8.7 for 9.3, 7.0 for 7.7)."""
_GATED = {(28672, 4096), (14336, 8192)}
"""Weights whose tiles are for a gate. Without it, as with an adapter, a tile has twice the rows, so that programs are as many:
twice as many no longer fit on the chip at once."""
_AHEAD = 512
"""Columns of a tile's weights that come to the L2 cache while the kernel ahead runs, at most."""


@triton.jit
def _fetch(at):
    """Has 128 bytes from each of these addresses come to the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["M"])
def _rows_kernel(
    x, weight, residual, out, parts, ended, M, x_stride, N, K, ADDS: tl.constexpr, GATE: tl.constexpr, SHARES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    tile, share = tl.program_id(0), tl.program_id(1)
    rows, columns, each = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_M)
    there = (each < M)[None, :]
    steps = K // BLOCK_K
    if PDL:
        gdc_launch_dependents()
        begin = steps * share // SHARES * BLOCK_K
        lines = begin + tl.arange(0, AHEAD // 64) * 64  # 128 bytes each
        early = weight + rows.to(tl.int64)[:, None] * K + tl.minimum(lines, K - 1)[None, :]
        _fetch(early)
        if GATE != 0:
            _fetch(early + N.to(tl.int64) * K)
        gdc_wait()
    weight_at = weight + rows.to(tl.int64)[:, None] * K + columns[None, :]
    up_at = weight_at + N.to(tl.int64) * K
    x_at = x + each[None, :] * x_stride + columns[:, None]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in tl.range(steps * share // SHARES, steps * (share + 1) // SHARES, num_stages=STAGES):
        at = step * BLOCK_K
        taken = tl.load(x_at + at, mask=there, other=0.0)
        total = tl.dot(tl.load(weight_at + at), taken, total)
        if GATE != 0:
            up = tl.dot(tl.load(up_at + at), taken, up)
    at_out = each[None, :] * N + rows[:, None]
    last = True
    if SHARES > 1:
        size = (2 if GATE != 0 else 1) * M * N
        tl.store(parts + share * size + at_out, total, mask=there)
        if GATE != 0:
            tl.store(parts + share * size + M * N + at_out, up, mask=there)
        tl.debug_barrier()  # all of it is written before this program counts as ended
        last = tl.atomic_add(ended + tile, 1) == SHARES - 1
    if last:
        if SHARES > 1:
            total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for other in tl.static_range(SHARES):  # past the processor's own cache: others wrote them
                total += tl.load(parts + other * size + at_out, mask=there, other=0.0, cache_modifier=".cg")
                if GATE != 0:
                    up += tl.load(parts + other * size + M * N + at_out, mask=there, other=0.0, cache_modifier=".cg")
            tl.store(ended + tile, 0)  # for the next launch
        if GATE == 1:
            total = total * tl.sigmoid(total) * up
        elif GATE == 2:
            inner = 0.7978845608028654 * (total + 0.044715 * total * total * total)
            total = total * tl.sigmoid(2.0 * inner) * up  # 0.5 (1 + tanh z) = sigmoid(2 z)
        if ADDS:
            total += tl.load(residual + at_out, mask=there, other=0.0).to(tl.float32)
        tl.store(out + at_out, total.to(out.dtype.element_ty), mask=there)


def few_rows(weight: Tensor) -> tuple[Callable[..., Tensor], int] | None:
    """The product with a weight [N, K], 16-bit, contiguous, and the most rows it is for; None: nothing is known of its size."""
    tiles = TILES.get((weight.shape[0], weight.shape[1]))
    if tiles is None or weight.element_size() != 2:
        return None
    ended = torch.zeros(max(weight.shape[0] // tile.rows for _, tile in tiles), dtype=torch.int32, device=weight.device)
    return partial(_product, weight=weight, ended=ended, tiles=tiles), tiles[-1][0]


def _product(
    x: Tensor,
    *,
    weight: Tensor,
    ended: Tensor,
    tiles: tuple[tuple[int, Tile], ...],
    norm: None = None,
    gate: Gate | None = None,
    add_to: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    tile = next(tile for most, tile in tiles if len(x) <= most)
    if gate is None and weight.shape in _GATED:
        tile = tile._replace(rows=2 * tile.rows)
    return product(x, weight, ended, tile, gate=gate, add_to=add_to, dtype=dtype)


def product(
    x: Tensor,
    weight: Tensor,
    ended: Tensor,
    tile: Tile,
    *,
    gate: Gate | None = None,
    add_to: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``gate(x @ weight.T) + add_to`` for a few rows.

    Args:
        x: [M, K], 16-bit; rows may lie apart.
        weight: [N, K], contiguous, of x's dtype; [2 N, K] with a gate: gate first, then up.
        ended: int32, zeros, one for each tile: what programs of a tile count in. It is zeros again afterwards, so that
            launches may share it that follow each other.
        tile: Its rows divide N, its columns K.
        gate: The activation, for ``activation(first half) * second half``.
        add_to: [M, N], contiguous: the result is added to it in place, and it is returned.
        dtype: The result's dtype; x's if not given.

    Returns:
        [M, N].
    """
    count, width = x.shape
    rows = weight.shape[0] // (1 if gate is None else 2)
    assert rows % tile.rows == 0 and width % tile.columns == 0, "the tile is of another size"
    out = torch.empty(count, rows, dtype=dtype or x.dtype, device=x.device) if add_to is None else add_to
    size = tile.shares * count * weight.shape[0] if tile.shares > 1 else 0
    parts = torch.empty(size, dtype=torch.float32, device=x.device)
    _rows_kernel[(rows // tile.rows, tile.shares)](
        x, weight, out, out, parts, ended, count, x.stride(0), rows, width, ADDS=add_to is not None,
        GATE={None: 0, "silu": 1, "gelu_tanh": 2}[gate], SHARES=tile.shares,
        BLOCK_M=max(_LEAST_ROWS, triton.next_power_of_2(count)), BLOCK_N=tile.rows, BLOCK_K=tile.columns, STAGES=tile.stages,
        num_warps=tile.warps, AHEAD=_AHEAD, **dependent_launch.options(x),
    )  # fmt: skip
    return out
