"""Triton: a linear layer whose rows each come out the same, to the bit, however many rows are computed with them.

A row's sum over the inputs is always cut into the same ``shares``, each summed in the order of its inputs, and added in order.
All tiles have the weight as the left side of the matrix units' product, so that instructions of one kind add up each element, 16
inputs at a time; tiles differ in how many rows stand side by side and in how many inputs are under way. With few rows each share
has a program of its own, and the last one of a tile to end adds them up; with many a program computes all shares of its tile.

Invariant: ``product(x)[i]`` depends on ``x[i]`` and the weight alone. Bound: with few rows one read of the weight, with many the
products. O(M N K).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

Gate = Literal["silu", "gelu_tanh"]

_UNIT = 128
"""Shares begin at multiples of so many inputs."""
_PROGRAMS = 112
"""Programs from which on a weight's tiles are enough for a chip; fewer are shared out."""
_MOST_SHARES = 8
_GROUP = 8
"""Tiles of the weight that programs of many rows go through together, so that both sides stay in the L2 cache."""


class Tile(NamedTuple):
    """What a program takes.

    Attributes:
        rows: Rows of x, a power of 2 of at least 16.
        outputs: Rows of the weight; with a gate as many again.
        warps: Of a program.
        stages: Steps whose numbers are under way at once.
        inputs: Of a step of its loop: 64 or 128.
    """

    rows: int
    outputs: int
    warps: int
    stages: int
    inputs: int = 64


_TILES = (Tile(16, 64, 4, 6), Tile(32, 64, 4, 6), Tile(64, 64, 4, 6), Tile(128, 64, 4, 4))
_MANY = Tile(128, 128, 8, 4)
_MANY_GATED = Tile(256, 64, 8, 3)


@triton.jit
def _share(
    x_at, weight_at, up_at, begin, end, columns, there, inside, K,
    GATE: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The sums of a tile over the inputs of one share: [OUTPUTS, ROWS], and those of the gate's other half."""
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    up = tl.zeros((OUTPUTS, ROWS), tl.float32)
    if STAGES > 0:
        for step in tl.range(begin, end, num_stages=STAGES):
            at = step * INPUTS
            known = (columns + at < K) if EVEN == 0 else (columns >= 0)
            taken = tl.load(x_at + at, mask=known[:, None] & there, other=0.0)
            total = tl.dot(
                tl.load(weight_at + at, mask=inside & known[None, :], other=0.0), taken, total, input_precision="ieee"
            )
            if GATE != 0:
                up = tl.dot(
                    tl.load(up_at + at, mask=inside & known[None, :], other=0.0), taken, up, input_precision="ieee"
                )
    else:  # Triton's interpreter cannot run such loops
        while begin < end:
            at = begin * INPUTS
            known = columns + at < K
            taken = tl.load(x_at + at, mask=known[:, None] & there, other=0.0)
            total = tl.dot(
                tl.load(weight_at + at, mask=inside & known[None, :], other=0.0), taken, total, input_precision="ieee"
            )
            if GATE != 0:
                up = tl.dot(
                    tl.load(up_at + at, mask=inside & known[None, :], other=0.0), taken, up, input_precision="ieee"
                )
            begin += 1
    return total, up


@triton.jit(do_not_specialize=["M"])
def _fixed_order_kernel(
    x, weight, bias, residual, out, parts, ended, M, x_stride, N, K,
    ADDS: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr, SHARES: tl.constexpr, APART: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    program, tiles, wide = tl.program_id(0), tl.cdiv(N, OUTPUTS), tl.cdiv(M, ROWS)
    first = program // (GROUP * wide) * GROUP
    high = tl.minimum(tiles - first, GROUP)
    tile = first + program % (GROUP * wide) % high
    slab = program % (GROUP * wide) // high
    outputs = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    rows = slab * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, INPUTS)
    there, inside = (rows < M)[None, :], (outputs < N)[:, None]
    weight_at = weight + outputs.to(tl.int64)[:, None] * K + columns[None, :]
    up_at = weight_at + N.to(tl.int64) * K
    x_at = x + rows.to(tl.int64)[None, :] * x_stride + columns[:, None]
    at_out = rows.to(tl.int64)[None, :] * N + outputs[:, None]
    kept = there & inside
    units = tl.cdiv(K, UNIT)
    steps: tl.constexpr = UNIT // INPUTS
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    up = tl.zeros((OUTPUTS, ROWS), tl.float32)
    last = True
    if APART:
        share = tl.program_id(1)
        part, other = _share(
            x_at, weight_at, up_at, units * share // SHARES * steps, units * (share + 1) // SHARES * steps, columns, there,
            inside, K, GATE, EVEN, ROWS, OUTPUTS, INPUTS, STAGES,
        )  # fmt: skip
        size = (2 if GATE != 0 else 1) * M.to(tl.int64) * N
        tl.store(parts + share * size + at_out, part, mask=kept)
        if GATE != 0:
            tl.store(parts + share * size + M.to(tl.int64) * N + at_out, other, mask=kept)
        tl.debug_barrier()  # all of it is written before this program counts as ended
        last = tl.atomic_add(ended + program, 1) == SHARES - 1
        if last:
            for each in tl.static_range(SHARES):  # past the processor's own cache: others wrote them
                total += tl.load(parts + each * size + at_out, mask=kept, other=0.0, cache_modifier=".cg")
                if GATE != 0:
                    up += tl.load(
                        parts + each * size + M.to(tl.int64) * N + at_out, mask=kept, other=0.0, cache_modifier=".cg"
                    )
            tl.store(ended + program, 0)  # for the next launch
    else:
        for each in tl.static_range(SHARES):
            part, other = _share(
                x_at, weight_at, up_at, units * each // SHARES * steps, units * (each + 1) // SHARES * steps, columns, there,
                inside, K, GATE, EVEN, ROWS, OUTPUTS, INPUTS, STAGES,
            )  # fmt: skip
            total += part
            up += other
    if last:
        if BIAS:
            total += tl.load(bias + outputs, mask=outputs < N, other=0.0).to(tl.float32)[:, None]
            if GATE != 0:
                up += tl.load(bias + N + outputs, mask=outputs < N, other=0.0).to(tl.float32)[:, None]
        if GATE == 1:
            total = total * tl.sigmoid(total) * up
        elif GATE == 2:
            inner = 0.7978845608028654 * (total + 0.044715 * total * total * total)
            total = total * tl.sigmoid(2.0 * inner) * up  # 0.5 (1 + tanh z) = sigmoid(2 z)
        if ADDS:
            total += tl.load(residual + at_out, mask=kept, other=0.0).to(tl.float32)
        tl.store(out + at_out, total.to(out.dtype.element_ty), mask=kept)


class FixedOrderProduct:
    """``gate(x @ weight.T + bias) + add_to``, row by row the same whatever rows are beside it.

    Args:
        weight: [N, K], contiguous; [2 N, K] for a gate: gate first, then up.
        bias: [N] or [2 N].
        processors: Of the device.
        tile: Of every product, whatever its rows; None: by their number.
        apart: Whether shares have programs of their own; None: where there are few tiles.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        processors: int,
        *,
        tile: Tile | None = None,
        apart: bool | None = None,
    ) -> None:
        assert weight.is_contiguous()
        self._weight, self._bias, self._processors = weight, bias, processors
        self._tile, self._apart = tile, apart
        # Zeros between launches; as many as programs of the most that are shared out.
        self._ended = torch.zeros(
            max(4 * processors, -(-len(weight) // 16) * 8), dtype=torch.int32, device=weight.device
        )

    def __call__(
        self,
        x: Tensor,
        *,
        norm: tuple[Tensor, float] | None = None,
        gate: Gate | None = None,
        add_to: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Implements ``OneRow`` for any number of rows [M, K], which may lie apart, without a norm.

        Raises:
            AssertionError: There is a norm.
        """
        assert norm is None, "the norm is computed before"
        weight = self._weight
        count, width = x.shape
        outputs = len(weight) // (1 if gate is None else 2)
        shares = shares_of(len(weight), width)
        tile = self._tile or tile_of(count, gated=gate is not None)
        programs = -(-outputs // tile.outputs) * -(-count // tile.rows)
        apart = shares > 1 and (programs < self._processors if self._apart is None else self._apart)
        assert not apart or programs <= len(self._ended)
        out = torch.empty(count, outputs, dtype=dtype or x.dtype, device=x.device) if add_to is None else add_to
        parts = torch.empty(shares * count * len(weight) if apart else 0, dtype=torch.float32, device=x.device)
        _fixed_order_kernel[(programs, shares if apart else 1)](
            x, weight, weight if self._bias is None else self._bias, out, out, parts, self._ended, count, x.stride(0), outputs,
            width, ADDS=add_to is not None, BIAS=self._bias is not None, GATE={None: 0, "silu": 1, "gelu_tanh": 2}[gate],
            SHARES=shares, APART=apart, EVEN=int(width % _UNIT == 0), ROWS=tile.rows, OUTPUTS=tile.outputs, INPUTS=tile.inputs,
            UNIT=_UNIT, GROUP=_GROUP, STAGES=tile.stages if x.is_cuda else 0, num_warps=tile.warps,
        )  # fmt: skip
        return out


def shares_of(outputs: int, inputs: int) -> int:
    """Into how many shares the inputs of a weight [outputs, inputs] are cut: by its size alone."""
    shares = 1
    while shares < _MOST_SHARES and outputs // 64 * shares < _PROGRAMS and inputs >= 2 * _UNIT * shares:
        shares *= 2
    return shares


def tile_of(rows: int, *, gated: bool) -> Tile:
    """The tile of a product of so many rows. It does not change a row's result."""
    return next((tile for tile in _TILES if rows <= tile.rows), _MANY_GATED if gated else _MANY)
