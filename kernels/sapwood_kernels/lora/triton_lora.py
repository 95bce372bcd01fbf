"""Triton: the products of adapters. Shrink: ``x A.T`` for all parts of a linear layer in one launch; expand: the result times
``B.T``, added to the layer's output in place, or added and gated in the same pass.

A program takes groups of rows (``layout.py``), so that an adapter's matrices are read once for all of its rows of a group: at
decode 16 rows of a tensor core's product, of a prompt 64. A row alone is multiplied without tensor cores: its matrices go from
memory to registers, all at once. Programs of groups that are not there end at once; so one captured launch serves every mix of
adapters. Few rows leave the chip idle: the inputs are then shared out to several programs (``SPLITS``), whose sums the expand
adds up in their order, so that results are the same each time.

Kernels of few rows overlap with those before and after them (``dependent_launch``): groups, ranks and matrices are there before
the step begins, x and out are waited for.

Bound: one read of x, of each used adapter's matrices for each group, and a read and a write of the output. O(T r (P K + N)).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sapwood_kernels import dependent_launch
from sapwood_kernels.lora.layout import Gate, LoraPlace

FEW = 16
"""Rows of a group at decode."""
MANY = 64
"""Rows of a group of prompts."""
SHORT = 2048
"""Rows up to which the inputs of prompts are shared out to more programs."""
_LEAST = 16
"""The smallest side of a tensor core's product."""
_MOST_SPLITS = 16
_MOST_LINES = 64
"""Lines of A that a program takes."""
_ONE = 8192
"""Numbers of A in a step of the loop for a row alone."""
_ALL = 1 << 16
"""More groups than there are."""
_MOST_PARTS = 3
_PDL_ROWS = 256
"""Rows up to which kernels overlap with those around them."""


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["order", "groups"])
def _shrink_kernel(
    x, memory, order, groups, low, x_stride, slot_stride, offset, K, T, LOW,
    PARTS: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    ONE_K: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    group, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
    slot = tl.load(groups + group)
    start = tl.load(groups + tl.num_programs(0) + group)
    count = tl.load(groups + 2 * tl.num_programs(0) + group)
    # A multiple of 16, so that matrices are read in whole words.
    rank = tl.multiple_of(tl.load(groups + 3 * tl.num_programs(0) + group).to(tl.int32), 16)
    first = block * BLOCK_R
    if PDL:
        gdc_wait()
    if (slot >= 0) & (count > 0) & (first < PARTS * rank):
        lines = first + tl.arange(0, BLOCK_R)
        inside = lines < PARTS * rank
        matrices = memory + slot * slot_stride + rank * offset
        low_at = low + (split * T + start) * LOW
        if count == 1:
            wide = tl.arange(0, ONE_K)
            wide_steps = tl.cdiv(K, ONE_K)
            line_at = matrices + lines.to(tl.int64)[:, None] * K + wide[None, :]
            row_at = x + tl.load(groups + 4 * tl.num_programs(0) + group) * x_stride + wide
            sums = tl.zeros((BLOCK_R,), tl.float32)
            for step in tl.range(wide_steps * split // SPLITS, wide_steps * (split + 1) // SPLITS, num_stages=1):
                at = step * ONE_K
                there_one = wide < K - at
                whole = tl.load(line_at + at, mask=inside[:, None] & there_one[None, :], other=0.0).to(tl.float32)
                given = tl.load(row_at + at, mask=there_one, other=0.0).to(tl.float32)
                sums += tl.sum(whole * given[None, :], 1)
            tl.store(low_at + lines, sums, mask=inside)
        else:
            each, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
            there = each < count
            row = tl.load(order + start + each, mask=there, other=0)
            x_at = x + row[:, None] * x_stride + columns[None, :]
            a_at = matrices + lines.to(tl.int64)[None, :] * K + columns[:, None]
            total = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
            steps = tl.cdiv(K, BLOCK_K)
            for step in tl.range(steps * split // SPLITS, steps * (split + 1) // SPLITS, num_stages=STAGES):
                at = step * BLOCK_K
                known = columns < K - at
                taken = tl.load(x_at + at, mask=there[:, None] & known[None, :], other=0.0)
                matrix = tl.load(a_at + at, mask=inside[None, :] & known[:, None], other=0.0)
                total = tl.dot(taken, matrix, total, input_precision=PRECISION)
            tl.store(low_at + each[:, None] * LOW + lines[None, :], total, mask=there[:, None] & inside[None, :])


@triton.jit
def _gated(total, up, GATE: tl.constexpr):
    if GATE == 1:
        return total * tl.sigmoid(total) * up
    inner = 0.7978845608028654 * (total + 0.044715 * total * total * total)
    return total * tl.sigmoid(2.0 * inner) * up  # 0.5 (1 + tanh z) = sigmoid(2 z)


@triton.jit
def _row_product(
    low_at, b_at, rank, inside, stride, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr
):
    """The product of one low-rank row with a tile of B: [BLOCK_N]."""
    line = tl.arange(0, BLOCK_R)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for step in tl.range(0, rank // BLOCK_R, num_stages=1):  # ranks are multiples of it
        first = tl.multiple_of(step * BLOCK_R, BLOCK_R)
        matrix = tl.load(b_at + first, mask=inside[:, None], other=0.0).to(tl.float32)
        row = tl.load(low_at + first + line)
        for split in tl.static_range(1, SPLITS):
            row += tl.load(low_at + split * stride + first + line)
        total += tl.sum(matrix * row[None, :], 1)
    return total


@triton.jit
def _product(
    low_at, b_at, rank, there, inside, stride, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The product of a group's low-rank rows with a tile of B: [BLOCK_M, BLOCK_N]."""
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in tl.range(0, rank // BLOCK_R, num_stages=1):  # ranks are multiples of it
        first = tl.multiple_of(step * BLOCK_R, BLOCK_R)
        matrix = tl.load(b_at + first, mask=inside[:, None], other=0.0)
        rows = tl.load(low_at + first, mask=there[:, None], other=0.0)
        for split in tl.static_range(1, SPLITS):
            rows += tl.load(low_at + split * stride + first, mask=there[:, None], other=0.0)
        total = tl.dot(rows.to(matrix.dtype), tl.trans(matrix), total, input_precision=PRECISION)
    return total


@triton.jit(do_not_specialize=["T", "G"], do_not_specialize_on_alignment=["order", "groups"])
def _expand_kernel(
    low, memory, order, groups, out, gated, slot_stride, offset, T, G, LOW, OUT, N0, N1, N2,
    PARTS: tl.constexpr, GATE: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, ONE: tl.constexpr, ACROSS: tl.constexpr, PDL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    if ACROSS:
        block, group, walks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    else:
        block, group, walks = tl.program_id(1), tl.program_id(0), tl.num_programs(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    part, first, size, before = 0, block * BLOCK_N, N0, 0
    if (PARTS > 1) & (GATE == 0):
        blocks = tl.cdiv(N0, BLOCK_N)
        if block >= blocks:
            part, first, size, before = 1, (block - blocks) * BLOCK_N, N1, N0
            if PARTS > 2:
                blocks += tl.cdiv(N1, BLOCK_N)
                if block >= blocks:
                    part, first, size, before = 2, (block - blocks) * BLOCK_N, N2, N0 + N1
    each, line = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_R)
    columns = first + tl.arange(0, BLOCK_N)
    inside = columns < size
    count = tl.load(groups + 2 * G + group)
    while count > 0:  # groups that are not there are the last ones
        slot = tl.load(groups + group)
        start = tl.load(groups + G + group)
        rank = tl.multiple_of(tl.load(groups + 3 * G + group).to(tl.int32), 16)
        row = tl.load(groups + 4 * G + group)
        following = group + walks
        ahead = tl.load(groups + 2 * G + following, mask=following < G, other=0)
        if (slot >= 0) | (GATE != 0):
            matrices = memory + tl.maximum(slot, 0) * slot_stride + rank * offset
            b_at = matrices + (before + columns).to(tl.int64)[:, None] * rank + line[None, :]
            b_up = b_at + tl.cast(N0, tl.int64) * rank
            low_at = low + start * LOW + part * rank
            if ONE & (count == 1):
                out_at = out + row * OUT + before + columns
                total = tl.load(out_at, mask=inside, other=0.0).to(tl.float32)
                if GATE != 0:
                    up = tl.load(out_at + N0, mask=inside, other=0.0).to(tl.float32)
                    up += _row_product(low_at + rank, b_up, rank, inside, T * LOW, SPLITS, BLOCK_N, BLOCK_R)
                total += _row_product(low_at, b_at, rank, inside, T * LOW, SPLITS, BLOCK_N, BLOCK_R)
                if GATE != 0:
                    result = _gated(total, up, GATE).to(gated.dtype.element_ty)
                    tl.store(gated + row * N0 + columns, result, mask=inside)
                else:
                    tl.store(out_at, total.to(out.dtype.element_ty), mask=inside)
            else:
                there = each < count
                rows = tl.load(order + start + each, mask=there, other=0)
                mask = there[:, None] & inside[None, :]
                lows = low_at + each[:, None] * LOW + line[None, :]
                outs = out + rows[:, None] * OUT + (before + columns)[None, :]
                held = tl.load(outs, mask=mask, other=0.0)
                if GATE != 0:
                    held_up = tl.load(outs + N0, mask=mask, other=0.0)
                sums = held + _product(
                    lows, b_at, rank, there, inside, T * LOW, SPLITS, BLOCK_M, BLOCK_N, BLOCK_R, PRECISION
                )
                if GATE != 0:
                    ups = held_up + _product(
                        lows + rank, b_up, rank, there, inside, T * LOW, SPLITS, BLOCK_M, BLOCK_N, BLOCK_R, PRECISION
                    )
                    gated_at = gated + rows[:, None] * N0 + columns[None, :]
                    tl.store(gated_at, _gated(sums, ups, GATE).to(gated.dtype.element_ty), mask=mask)
                else:
                    tl.store(outs, sums.to(out.dtype.element_ty), mask=mask)
        group, count = following, ahead


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"  # the latter says nothing about 16 bits


class Tiles(NamedTuple):
    """What programs take.

    Attributes:
        inputs: Of a step of the shrink's loop.
        splits: Programs that share the inputs.
        outputs: Of an expand.
        walks: Programs that share the groups for the same outputs, at most.
        across: Whether expands of the same rows follow each other, not those of the same outputs.
        registers: Of a thread of an expand, at most; None: as many as it takes.
    """

    inputs: int
    splits: int
    outputs: int
    walks: int
    across: bool
    registers: int | None


def tiles_for(most: int, count: int, columns: int) -> Tiles:
    """The tiles for so many rows in groups of at most so many, of a layer with so many inputs. Measured on an H200 with an 8B of
    Llama's shape and rank 16 (``benchmarks/results/2026-11-29-h200-lora-tiles.jsonl``).
    """
    if most <= FEW:
        return Tiles(128, min(max(columns // 1024, 1), _MOST_SPLITS), 256, 64, True, 128)
    inputs, splits = (128, 4) if count <= SHORT else (64, 2)
    return Tiles(inputs, splits, 64, _ALL, False, None)


class Rows(NamedTuple):
    """The rows of a batch by slot, on the device.

    Attributes:
        order: int64 [T], as :class:`~sapwood_kernels.lora.layout.RowGroups` has it.
        groups: int64 [5, G]: of each group its slot, where it starts, how many rows it has, the rank of the slot's adapter, a
            multiple of 16, 0 without one, and its first row. Groups at the end may be empty.
        most: The most rows of a group.
    """

    order: Tensor
    groups: Tensor
    most: int


def shrink(place: LoraPlace, x: Tensor, rows: Rows, low: Tensor, *, alone: bool = True) -> None:
    """Each row times its adapter's A.

    Args:
        place: The linear layer's matrices.
        x: [T, K]; rows may lie apart.
        rows: Which adapter is for which.
        low: float32 [splits, T, P * largest rank]: the result, in the order of ``rows``; undefined beyond P times the adapter's
            own rank, and for rows without an adapter.
        alone: Whether nothing runs beside it, so that it may overlap with the kernels before and after it.
    """
    assert isinstance(place.memory, Tensor)
    _, count, width = low.shape
    parts, tiles = len(place.parts), tiles_for(rows.most, count, place.columns)
    block = min(max(triton.next_power_of_2(width), _LEAST), _MOST_LINES)
    _shrink_kernel[(rows.groups.shape[1], triton.cdiv(width, block), tiles.splits)](
        x, place.memory, rows.order, rows.groups, low, x.stride(0), place.memory.stride(0), place.offset,
        place.columns, count, width, PARTS=parts, SPLITS=tiles.splits, BLOCK_M=max(rows.most, _LEAST), BLOCK_R=block,
        BLOCK_K=tiles.inputs, ONE_K=_ONE // block, STAGES=3, PRECISION=_precision(x), num_warps=4,
        **dependent_launch.options(x, _PDL_ROWS if alone else 0),
    )  # fmt: skip


def expand(
    place: LoraPlace, low: Tensor, out: Tensor, rows: Rows, gate: Gate | None = None, *, alone: bool = True
) -> Tensor:
    """Adds what :func:`shrink` gave times B to ``out`` [T, N], contiguous, in place, and returns it. With a gate: returns the
    gated activation of the sum, [T, N / 2], of all rows, and leaves ``out`` as it is.

    Args:
        place, rows: As for :func:`shrink`.
        low: Its result.
        out: What is added to.
        gate: ``silu`` or ``gelu_tanh``.
        alone: As for :func:`shrink`.
    """
    assert isinstance(place.memory, Tensor) and out.is_contiguous() and len(place.parts) <= _MOST_PARTS
    parts, sizes, groups = len(place.parts), (*place.parts, 0, 0)[:_MOST_PARTS], rows.groups.shape[1]
    tiles = tiles_for(rows.most, len(out), place.columns)
    blocks = sum(triton.cdiv(size, tiles.outputs) for size in (place.parts[:1] if gate else place.parts))
    gated = out if gate is None else torch.empty(len(out), sizes[0], dtype=out.dtype, device=out.device)
    walks = min(groups, tiles.walks)
    _expand_kernel[(blocks, walks) if tiles.across else (walks, blocks)](
        low, place.memory, rows.order, rows.groups, out, gated, place.memory.stride(0),
        place.offset + parts * place.columns, len(out), groups, low.shape[2], out.shape[1], *sizes, PARTS=parts,
        GATE={None: 0, "silu": 1, "gelu_tanh": 2}[gate], SPLITS=tiles.splits, BLOCK_M=max(rows.most, _LEAST),
        BLOCK_N=tiles.outputs, BLOCK_R=_LEAST, ONE=rows.most == FEW, ACROSS=tiles.across, PRECISION=_precision(out),
        num_warps=4, maxnreg=tiles.registers,
        **dependent_launch.options(out, _PDL_ROWS if alone else 0),
    )  # fmt: skip
    return gated


class Shrunk(NamedTuple):
    """What :meth:`TritonLora.shrink` returns.

    Attributes:
        low: As :func:`shrink` returns it.
        done: Its end, where it runs beside the current stream; None: it runs there.
    """

    low: Tensor
    done: torch.cuda.Event | None


class TritonLora:
    """Implements :class:`~sapwood_kernels.lora.layout.LoraProducts`.

    Args:
        most: The largest rank.
        aside: A stream for shrinks of captured batches, which run beside the layer's own product; None: none do.
    """

    def __init__(self, most: int, aside: torch.cuda.Stream | None = None) -> None:
        self._most, self._aside = most, aside
        self._rows: Rows | None = None
        self._beside = False

    def begin(self, rows: Rows, *, captured: bool = False) -> None:
        """The rows of the batch that is computed or captured next. Where the host launches each kernel, a second stream would
        cost it more than is gained, so only shrinks of captured batches run beside the layers' own products."""
        self._rows, self._beside = rows, captured and self._aside is not None

    def shrink(self, place: LoraPlace, x: Tensor) -> Shrunk:
        assert self._rows is not None, "no batch was begun"
        splits = tiles_for(self._rows.most, len(x), place.columns).splits
        low = torch.empty(splits, len(x), len(place.parts) * self._most, dtype=torch.float32, device=x.device)
        if self._aside is None or not self._beside:
            shrink(place, x, self._rows, low)
            return Shrunk(low, None)
        self._aside.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(self._aside):
            shrink(place, x, self._rows, low, alone=False)
        return Shrunk(low, self._aside.record_event())

    def add(self, place: LoraPlace, low: Shrunk, out: Tensor) -> Tensor:
        return self._expand(place, low, out, None)

    def add_gated(self, place: LoraPlace, low: Shrunk, out: Tensor, gate: Gate) -> Tensor:
        return self._expand(place, low, out, gate)

    def _expand(self, place: LoraPlace, found: Shrunk, out: Tensor, gate: Gate | None) -> Tensor:
        assert self._rows is not None, "no batch was begun"
        if found.done is not None:
            torch.cuda.current_stream(out.device).wait_event(found.done)
        return expand(place, found.low, out, self._rows, gate, alone=found.done is None)
