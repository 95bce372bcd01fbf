"""Triton: rows go to the ranks that have their experts, and what these made of them comes back, over CUDA IPC.

A rank writes each of its rows into the region of every rank that has one of the row's experts, with their numbers and weights,
and meets the others; it then has the rows that came to it. Their sums go the same way back, to be added up in the order of the
ranks in float32 and rounded once. Shapes depend on the number of rows only, never on what routers chose, and nothing waits for
the host: all of it can be captured in CUDA graphs. How many rows went where is counted on the device.

A region has one place for each row of each rank, and takes turns with nothing: a rank that begins the next dispatch has met all
others in this one's return, and they have begun that when their experts were done with the rows; likewise for sums.

Bound: the link, which carries a row once for each other rank that has one of its experts, and a sum for each of these back; for
few rows two writes to the other GPUs and two looks at what they wrote. The idea is that of DeepEP, with slots of a fixed size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sapwood_kernels.experts.payload import GROUP, RowShape
from sapwood_kernels.ranks.triton_meeting import PROGRAMS, WAIT_FOREVER, meet, signal_bytes

_HEAD_WORDS = 2
"""Words of 32 bits before a row's experts and weights: whether it came, and to how many other ranks it went."""


@triton.jit
def _place(peers, rank, at, source, row, ROWS: tl.constexpr, EACH: tl.constexpr, KIND: tl.constexpr):
    """A rank's copy of a source's row, in the part of the rank's region that begins at ``at`` with this many bytes for each
    row."""
    begin = tl.load(peers + rank) + at + tl.cast(source * ROWS + row, tl.int64) * EACH
    return tl.multiple_of(begin.to(tl.pointer_type(KIND)), 16)


@triton.jit
def _codes(values, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """``payload.to_float8`` of a row: the codes' bytes [BLOCK], and a byte for each group."""
    grouped = tl.reshape(values, (BLOCK // GROUP, GROUP))
    largest = tl.max(tl.abs(grouped), axis=1).to(tl.int32, bitcast=True)
    biased = tl.maximum(largest >> 23, 8) - 7
    scaled = grouped * ((254 - biased) << 23).to(tl.float32, bitcast=True)[:, None]
    codes = tl.reshape(scaled, (BLOCK,)).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return codes, biased.to(tl.uint8)


@triton.jit(do_not_specialize=["own", "rows", "rank", "most"])
def _dispatch_kernel(
    x, ids, weights, holders, found, found_ids, found_weights, counts, moved, peers, calls, broken, own, rows, rank, most,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, CHOSEN: tl.constexpr, FLOAT8: tl.constexpr,
    HEADS_AT: tl.constexpr, ROWS_AT: tl.constexpr, HEAD: tl.constexpr, ROW_BYTES: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, PLACES: tl.constexpr, GROUP: tl.constexpr, FOREVER: tl.constexpr,
):  # fmt: skip
    KIND: tl.constexpr = x.dtype.element_ty  # noqa: N806
    SENT: tl.constexpr = tl.uint8 if FLOAT8 else KIND  # noqa: N806
    GROUPS: tl.constexpr = (WIDTH + GROUP - 1) // GROUP  # noqa: N806
    program, programs = tl.program_id(0), tl.num_programs(0)
    call = tl.load(calls + program) + 1
    columns, each, nth = tl.arange(0, BLOCK), tl.arange(0, PLACES), tl.arange(0, BLOCK // GROUP if FLOAT8 else 1)
    wide = each < CHOSEN
    for row in range(program, rows, programs):
        real = each < tl.where(row < own, CHOSEN, 0)
        chosen = tl.load(ids + row * CHOSEN + each, mask=real, other=EXPERTS).to(tl.int32)
        factors = tl.load(weights + row * CHOSEN + each, mask=real, other=0.0)
        where = tl.load(holders + row * CHOSEN + each, mask=real, other=SIZE)
        values = tl.load(
            x + tl.cast(row, tl.int64) * WIDTH + columns, mask=columns < tl.where(row < own, WIDTH, 0), other=0.0
        )
        exponents = nth.to(tl.uint8)
        if FLOAT8:
            values, exponents = _codes(values.to(tl.float32), BLOCK, GROUP)
        others = 0
        for peer in tl.static_range(SIZE):
            others += tl.where(peer == rank, 0, tl.max((where == peer).to(tl.int32), axis=0))
        for peer in tl.static_range(SIZE):
            here = tl.max((where == peer).to(tl.int32), axis=0)
            head = _place(peers, peer, HEADS_AT, rank, row, ROWS, 4 * HEAD, tl.int32)
            tl.store(head, here)
            tl.store(head + 1, others)
            tl.store(head + 2 + each, chosen, mask=wide)
            tl.store(head + 2 + CHOSEN + each, factors.to(tl.int32, bitcast=True), mask=wide)
            place = _place(peers, peer, ROWS_AT, rank, row, ROWS, ROW_BYTES, SENT)
            tl.store(place + columns, values, mask=columns < here * WIDTH)
            if FLOAT8:
                tl.store(place + WIDTH + nth, exponents, mask=nth < here * GROUPS)
    meet(peers, broken, rank, program, call, most, SIZE, FOREVER)
    sent, seen = 0, 0
    for row in range(program, rows, programs):
        for source in tl.static_range(SIZE):
            at = tl.cast(source * rows + row, tl.int64)
            head = _place(peers, rank, HEADS_AT, source, row, ROWS, 4 * HEAD, tl.int32)
            came = tl.load(head)  # 0 or 1
            sent += tl.load(head + 1)
            chosen = tl.load(head + 2 + each, mask=wide, other=EXPERTS)
            seen += tl.max((chosen < EXPERTS).to(tl.int32), axis=0)
            tl.store(found_ids + at * CHOSEN + each, chosen, mask=wide)
            factors = tl.load(head + 2 + CHOSEN + each, mask=wide, other=0).to(tl.float32, bitcast=True)
            tl.store(found_weights + at * CHOSEN + each, factors, mask=wide)
            tl.atomic_add(counts + chosen, tl.full((PLACES,), 1, tl.int64), mask=chosen < EXPERTS, sem="relaxed")
            place = _place(peers, rank, ROWS_AT, source, row, ROWS, ROW_BYTES, SENT)
            values = tl.load(place + columns, mask=columns < came * WIDTH, other=0)
            if FLOAT8:
                exponents = tl.load(place + WIDTH + nth, mask=nth < came * GROUPS, other=0).to(tl.int32)
                scales = (exponents << 23).to(tl.float32, bitcast=True)
                wider = tl.reshape(values.to(tl.float8e4nv, bitcast=True).to(tl.float32), (BLOCK // GROUP, GROUP))
                values = tl.reshape(wider * scales[:, None], (BLOCK,))
            tl.store(found + at * WIDTH + columns, values.to(KIND), mask=columns < came * WIDTH)
    tl.atomic_add(moved, tl.cast(sent, tl.int64), sem="relaxed")
    tl.atomic_add(moved + 1, tl.cast(seen, tl.int64), sem="relaxed")
    tl.store(calls + program, call)


@triton.jit(do_not_specialize=["own", "rows", "rank", "most"])
def _combine_kernel(
    part, holders, out, peers, calls, broken, own, rows, rank, most, WIDTH: tl.constexpr, SIZE: tl.constexpr,
    CHOSEN: tl.constexpr, HEADS_AT: tl.constexpr, SUMS_AT: tl.constexpr, HEAD: tl.constexpr, SUM_BYTES: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PLACES: tl.constexpr, FOREVER: tl.constexpr,
):  # fmt: skip
    KIND: tl.constexpr = part.dtype.element_ty  # noqa: N806
    program, programs = tl.program_id(0), tl.num_programs(0)
    call = tl.load(calls + program) + 1
    columns, each = tl.arange(0, BLOCK), tl.arange(0, PLACES)
    for row in range(program, rows, programs):
        for source in tl.static_range(SIZE):
            came = tl.load(_place(peers, rank, HEADS_AT, source, row, ROWS, 4 * HEAD, tl.int32))  # 0 or 1
            inside = columns < came * WIDTH
            at = tl.cast(source * rows + row, tl.int64) * WIDTH
            place = _place(peers, source, SUMS_AT, rank, row, ROWS, SUM_BYTES, KIND)
            tl.store(place + columns, tl.load(part + at + columns, mask=inside, other=0.0), mask=inside)
    meet(peers, broken, rank, program, call, most, SIZE, FOREVER)
    for row in range(program, own, programs):
        where = tl.load(holders + row * CHOSEN + each, mask=each < CHOSEN, other=SIZE)
        total = tl.zeros((BLOCK,), tl.float32)
        for peer in tl.static_range(SIZE):
            here = tl.max((where == peer).to(tl.int32), axis=0)
            place = _place(peers, rank, SUMS_AT, peer, row, ROWS, SUM_BYTES, KIND)
            total += tl.load(place + columns, mask=columns < here * WIDTH, other=0.0).to(tl.float32)
        tl.store(out + tl.cast(row, tl.int64) * WIDTH + columns, total.to(KIND), mask=columns < WIDTH)
    tl.store(calls + program, call)


class PeerRows:
    """Rows' ways by these kernels.

    Args:
        addresses: Where each rank's region is mapped in this process. A region has :meth:`region_bytes` bytes, zero at first,
            aligned to 256 bytes.
        rank: This process, from 0.
        shape: The rows.
        most_rows: Rows of a rank at a time, at most.
        device: Where the tensors are.

    Attributes:
        moved: int64 [2], on the device: rows that all ranks have sent to others, each rank counted that got one, and their rows.
    """

    def __init__(self, addresses: list[int], rank: int, shape: RowShape, most_rows: int, device: torch.device) -> None:
        self._size, self._rank, self._shape, self._most = len(addresses), rank, shape, most_rows
        self._peers = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._calls = torch.zeros(PROGRAMS, dtype=torch.int64, device=device)
        self.moved = torch.zeros(2, dtype=torch.int64, device=device)
        self._broken = torch.zeros(1, dtype=torch.int32, device=device)

    @staticmethod
    def region_bytes(shape: RowShape, most_rows: int, size: int) -> int:
        """Bytes of a rank's region."""
        head, row, back = _each_bytes(shape)
        return signal_bytes(PROGRAMS, size) + size * most_rows * (head + row + back)

    def dispatch(
        self, x: Tensor, ids: Tensor, weights: Tensor, holders: Tensor, rows: int, counts: Tensor, tries: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sends rows; asynchronous on the current stream.

        Args:
            x: [T, N], contiguous.
            ids: Integers [T, k]: their experts, E for none.
            weights: float32 [T, k].
            holders: Integers [T, k]: the ranks that have them; the number of ranks for none.
            rows: Rows of the rank that has most, the same on all.
            counts: int64 [E]: what each expert gets from all ranks is added.
            tries: How often signals that do not come are looked for before what comes out is given up and wrong.

        Returns:
            For ``rows`` of each rank, rank after rank: the row, undefined where none of its experts is here; its experts, int32,
            E for none; their weights, float32.
        """
        shape, total = self._shape, self._size * rows
        assert x.is_contiguous() and len(x) <= rows <= self._most
        found = x.new_empty(total, shape.width)
        found_ids = torch.empty(total, shape.chosen, dtype=torch.int32, device=x.device)
        found_weights = torch.empty(total, shape.chosen, dtype=torch.float32, device=x.device)
        heads_at, rows_at, _ = self._begins()
        head, row, _ = _each_bytes(shape)
        _dispatch_kernel[(min(PROGRAMS, rows),)](
            x, ids, weights, holders, found, found_ids, found_weights, counts, self.moved, self._peers, self._calls,
            self._broken, len(x), rows, self._rank, tries, EXPERTS=shape.experts, WIDTH=shape.width, SIZE=self._size,
            CHOSEN=shape.chosen, FLOAT8=shape.float8, HEADS_AT=heads_at, ROWS_AT=rows_at, HEAD=head // 4, ROW_BYTES=row,
            ROWS=self._most, **self._blocks(), GROUP=GROUP,
        )  # fmt: skip
        return found, found_ids, found_weights

    def combine(self, part: Tensor, holders: Tensor, rows: int, tries: int) -> Tensor:
        """The sums for this rank's rows, [T, N]; also asynchronous.

        Args:
            part: [ranks * rows, N], contiguous: the output of this rank's experts for the rows of :meth:`dispatch`.
            holders: As there.
            rows: As there.
            tries: As there.
        """
        shape = self._shape
        assert part.is_contiguous() and len(part) == self._size * rows
        out = part.new_empty(len(holders), shape.width)
        heads_at, _, sums_at = self._begins()
        head, _, back = _each_bytes(shape)
        _combine_kernel[(min(PROGRAMS, rows),)](
            part, holders, out, self._peers, self._calls, self._broken, len(holders), rows, self._rank, tries,
            WIDTH=shape.width, SIZE=self._size, CHOSEN=shape.chosen, HEADS_AT=heads_at, SUMS_AT=sums_at, HEAD=head // 4,
            SUM_BYTES=back, ROWS=self._most, **self._blocks(),
        )  # fmt: skip
        return out

    def broken(self) -> bool:
        """Whether some rank was given up; waits for the device."""
        return bool(self._broken.item())

    def _begins(self) -> tuple[int, int, int]:
        """Where in a region what comes before rows, rows, and sums are."""
        head, row, _ = _each_bytes(self._shape)
        heads = signal_bytes(PROGRAMS, self._size)
        rows = heads + self._size * self._most * head
        return heads, rows, rows + self._size * self._most * row

    def _blocks(self) -> dict[str, int]:
        block = max(GROUP, triton.next_power_of_2(self._shape.width))
        places = triton.next_power_of_2(self._shape.chosen)
        return {"BLOCK": block, "PLACES": places, "FOREVER": WAIT_FOREVER, "num_warps": min(max(block // 512, 1), 16)}


def _each_bytes(shape: RowShape) -> tuple[int, int, int]:
    """Bytes of what comes before a row, of a row and of a sum, in whole pieces of 16."""
    sizes = 4 * (_HEAD_WORDS + 2 * shape.chosen), shape.row_bytes, shape.sum_bytes
    head, row, back = (-(-each // 16) * 16 for each in sizes)
    return head, row, back
