"""Triton: sums over ranks whose memory each of them can write to, as one host's GPUs can over NVLink, by CUDA IPC.

One-shot, each rank sends its numbers to all others and adds up; two-shot, it gets a share of all ranks' numbers, and sends its
sums to the others. Both add up in the order of the ranks in float32 and round once: their sums are equal to the bit, on all
ranks. Calls are counted in device memory, so that CUDA graphs continue where other calls ended. Where the sum is added to a
residual that is normed next, one kernel does all of it. A row is then in parts, of a program each, which tell each other their
sums of squares as ranks tell numbers.

Bound: for small tensors the time in which a write comes to the other GPUs, twice that two-shot; for large ones the link, which
carries ``size - 1`` times the tensor one-shot and ``2 * (size - 1) / size`` times two-shot. Numbers that are their own signals
are an idea of NCCL's and TensorRT-LLM's; no multicast is used.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sapwood_kernels import dependent_launch
from sapwood_kernels.ranks.triton_meeting import WAIT_FOREVER
from sapwood_kernels.ranks.triton_push import added, come, send, sent, side_of

PROGRAMS = 128
"""Programs of a call, at most: fewer than a GPU has multiprocessors, so that all run at once."""
_BLOCK, _WIDE = 2048, 8192
"""Numbers that a program adds up at a time, and those that it takes of the others' sums."""
_LEAST_BYTES = 4096
"""Least bytes of a program's piece: for smaller tensors there are fewer programs. Also the most bytes of a part of a row."""
_VECTOR_BYTES = 16
_AREA = 2
"""Times the largest tensor that a side of a region has room for."""
_SQUARES = 256
"""Sums of squares that come to a program in a call, at most."""


@triton.jit(do_not_specialize=["count", "each", "rank", "most"])
def _rank_sum_kernel(
    x, peers, calls, done, broken, count, each, rank, most,
    SIZE: tl.constexpr, TWO: tl.constexpr, AREA_BYTES: tl.constexpr, PROGRAMS: tl.constexpr,
    VECTOR: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, FOREVER: tl.constexpr,
):  # fmt: skip
    KIND: tl.constexpr = x.dtype.element_ty  # noqa: N806
    BITS: tl.constexpr = tl.uint16 if KIND.primitive_bitwidth == 16 else tl.uint32  # noqa: N806
    program = tl.program_id(0)
    call, times = tl.load(calls + program) + 1, tl.load(done) + 1
    most = tl.where(tl.load(broken) == 0, most, 0)  # a late number would be taken for the next one
    side = side_of(peers, rank, program, call, BITS, AREA_BYTES, PROGRAMS)
    # All in whole vectors, so that the compiler knows that they can be moved at once.
    own = x + program * each * VECTOR
    length = tl.maximum(tl.minimum(each, count - program * each), 0) * VECTOR
    places = tl.arange(0, BLOCK)
    if TWO:
        share = each // SIZE * VECTOR
        first = rank * share
        for start in range(0, share, BLOCK):
            at = start + places
            for step in tl.static_range(1, SIZE):
                peer = (rank + step) % SIZE
                inside = at < tl.minimum(length - peer * share, share)
                bits = sent(tl.load(own + peer * share + at, mask=inside), BITS)
                theirs = side_of(peers, peer, program, call, BITS, AREA_BYTES, PROGRAMS)
                tl.store(theirs + first + at, bits, mask=inside)
        last = tl.minimum(length - first, share)
        for start in range(0, last, BLOCK):
            at = start + places
            mine = tl.load(own + first + at, mask=at < last, other=0.0)
            total = added(mine, side, broken, at, at < last, share, rank, most, KIND, BITS, SIZE, FOREVER).to(KIND)
            there = (SIZE + rank) * share + at
            send(total, peers, rank, program, call, there, at < last, SIZE, BITS, AREA_BYTES, PROGRAMS)
            tl.store(own + first + at, total, mask=at < last)
        for start in range(0, length, WIDE):
            at = start + tl.arange(0, WIDE)
            theirs = (at < length) & ((at < first) | (at >= first + share))
            summed = come(side + SIZE * share, broken, at, theirs, most, KIND, BITS, FOREVER)
            tl.store(own + at, summed, mask=theirs)
    else:
        room = each * VECTOR
        for start in range(0, length, BLOCK):
            at = start + places
            values = tl.load(own + at, mask=at < length)
            send(values, peers, rank, program, call, rank * room + at, at < length, SIZE, BITS, AREA_BYTES, PROGRAMS)
        for start in range(0, length, BLOCK):
            at = start + places
            mine = tl.load(own + at, mask=at < length, other=0.0)
            total = added(mine, side, broken, at, at < length, room, rank, most, KIND, BITS, SIZE, FOREVER)
            tl.store(own + at, total.to(KIND), mask=at < length)
    tl.store(calls + program, call)
    if program == 0:
        tl.store(done, times)


@triton.jit
def _add(
    total, residual, at, inside, squares, nth, program, SPLIT: tl.constexpr, KIND: tl.constexpr, PROGRAMS: tl.constexpr
):
    """Adds a part of a row to the residual, and tells all parts' programs the sum of its squares."""
    before = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    after = (before + total.to(tl.float32)).to(KIND)  # rounded as often as by a sum and a residual apart
    tl.store(residual + at, after, mask=inside)
    values = tl.where(inside, after.to(tl.float32), 0.0)
    bits = ~tl.sum(values * values, axis=0).to(tl.int32, bitcast=True)  # not zero: squares have no sign
    parts = tl.arange(0, triton.next_power_of_2(SPLIT))
    places = (nth * PROGRAMS + program // SPLIT * SPLIT + parts) * SPLIT + program % SPLIT
    tl.store(squares + places, tl.broadcast_to(bits, parts.shape), mask=parts < SPLIT)


@triton.jit
def _square(squares, broken, nth, program, most, SPLIT: tl.constexpr, PROGRAMS: tl.constexpr, FOREVER: tl.constexpr):
    """The sum of all parts' squares."""
    parts = tl.arange(0, triton.next_power_of_2(SPLIT))
    places = squares + (nth * PROGRAMS + program) * SPLIT + parts
    bits = tl.zeros(parts.shape, tl.int32)
    missing, tries = 1, 0
    while (missing > 0) & ((tries < most) | (most == FOREVER)):
        # By one thread, so that all of the program's see the same.
        bits = tl.atomic_add(places, tl.zeros(parts.shape, tl.int32), mask=parts < SPLIT, sem="relaxed", scope="gpu")
        missing = tl.max(((bits == 0) & (parts < SPLIT)).to(tl.int32), axis=0)
        tries += 1
    tl.store(places, tl.zeros(parts.shape, tl.int32), mask=parts < SPLIT)
    if missing > 0:
        tl.store(broken, 1)
    return tl.sum(tl.where(parts < SPLIT, (~bits).to(tl.float32, bitcast=True), 0.0), axis=0)


@triton.jit(do_not_specialize=["rows", "rank", "most"])
def _rank_normed_kernel(
    x, residual, weight, out, peers, squares, calls, done, broken, rows, rank, most, eps,
    N: tl.constexpr, PART: tl.constexpr, SPLIT: tl.constexpr, SIZE: tl.constexpr, TWO: tl.constexpr,
    AREA_BYTES: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr, FOREVER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    KIND: tl.constexpr = x.dtype.element_ty  # noqa: N806
    BITS: tl.constexpr = tl.uint16 if KIND.primitive_bitwidth == 16 else tl.uint32  # noqa: N806
    program = tl.program_id(0)
    call, times = tl.load(calls + program) + 1, tl.load(done) + 1
    most = tl.where(tl.load(broken) == 0, most, 0)
    side = side_of(peers, rank, program, call, BITS, AREA_BYTES, PROGRAMS)
    # A program has one part of every ``step``-th row; in two-shot each rank sums a share of these rows.
    top, step = program // SPLIT, tl.num_programs(0) // SPLIT
    count = (rows + step - 1) // step
    share = (count + SIZE - 1) // SIZE
    places = tl.arange(0, BLOCK)
    columns = program % SPLIT * PART + places
    inside = (places < PART) & (columns < N)
    factors = tl.load(weight + columns, mask=inside, other=0.0)
    for row in range(top, rows, step):
        nth = row // step
        values = tl.load(x + row * N + columns, mask=inside)
        if TWO:
            owner = (program + nth) % SIZE
            if owner != rank:
                theirs = side_of(peers, owner, program, call, BITS, AREA_BYTES, PROGRAMS)
                tl.store(theirs + (rank * share + nth // SIZE) * PART + places, sent(values, BITS), mask=inside)
        else:
            there = (rank * count + nth) * PART + places
            send(values, peers, rank, program, call, there, inside, SIZE, BITS, AREA_BYTES, PROGRAMS)
    # One-shot: this rank sums all of the rows; two-shot: only its share.
    every = SIZE if TWO else 1
    apart = (share if TWO else count) * PART
    first = (rank + SIZE - program % SIZE) % SIZE if TWO else 0
    for row in range(top + first * step, rows, every * step):
        nth = row // step
        at = row * N + columns
        mine = tl.load(x + at, mask=inside, other=0.0)
        here = nth // every * PART + places
        total = added(mine, side, broken, here, inside, apart, rank, most, KIND, BITS, SIZE, FOREVER).to(KIND)
        if TWO:
            there = (SIZE * share + nth) * PART + places
            send(total, peers, rank, program, call, there, inside, SIZE, BITS, AREA_BYTES, PROGRAMS)
        _add(total, residual, at, inside, squares, nth, program, SPLIT, KIND, PROGRAMS)
    if TWO:
        for row in range(top, rows, step):
            nth = row // step
            if (program + nth) % SIZE != rank:
                here = (SIZE * share + nth) * PART + places
                total = come(side, broken, here, inside, most, KIND, BITS, FOREVER)
                _add(total, residual, row * N + columns, inside, squares, nth, program, SPLIT, KIND, PROGRAMS)
    for row in range(top, rows, step):
        at = row * N + columns
        after = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        square = _square(squares, broken, row // step, program, most, SPLIT, PROGRAMS, FOREVER)
        tl.store(out + at, (after * tl.rsqrt(square / N + eps) * factors).to(KIND), mask=inside)
    tl.store(calls + program, call)
    if program == 0:
        tl.store(done, times)


class PeerAllReduce:
    """Sums over ranks by these kernels.

    Args:
        addresses: Where each rank's region is mapped in this process. A region has :meth:`region_bytes` bytes, zero at first,
            aligned to 256 bytes.
        rank: This process, from 0.
        most_bytes: Bytes of the largest tensor, a multiple of ``PROGRAMS * 16 * ranks``.
        device: Where the tensors are.
    """

    def __init__(self, addresses: list[int], rank: int, most_bytes: int, device: torch.device) -> None:
        self._size, self._rank = len(addresses), rank
        self._piece, self._area = most_bytes // PROGRAMS, _AREA * most_bytes // PROGRAMS
        assert most_bytes % (PROGRAMS * _VECTOR_BYTES * self._size) == 0, most_bytes
        self._peers = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._calls = torch.zeros(PROGRAMS, dtype=torch.int64, device=device)
        self._done = torch.zeros(4, dtype=torch.int64, device=device)
        self._broken = torch.zeros(1, dtype=torch.int32, device=device)
        self._squares = torch.zeros(_SQUARES * PROGRAMS, dtype=torch.int32, device=device)

    @staticmethod
    def region_bytes(most_bytes: int) -> int:
        """Bytes of a rank's region."""
        return 2 * _AREA * most_bytes

    def most_bytes(self, *, two_shot: bool) -> int:
        """Bytes of the largest tensor that is summed in this way."""
        return PROGRAMS * self._room(two_shot)

    def _room(self, two_shot: bool) -> int:
        """Bytes of a program's piece, at most, in whole vectors for every rank."""
        unit = _VECTOR_BYTES * self._size
        return self._piece if two_shot else min(self._piece, self._area // self._size // unit * unit)

    def sum(self, x: Tensor, *, two_shot: bool, tries: int = WAIT_FOREVER) -> None:
        """Sums a contiguous tensor over the ranks, in place; asynchronous on the current stream.

        Args:
            x: Of numbers of 16 or 32 bits, at most :meth:`most_bytes` large.
            two_shot: Whether each rank sums a share only, and sends its sums to the others.
            tries: How often the kernel looks for missing numbers before it gives the sum up; this sum and all later ones are then
                wrong.
        """
        assert x.is_contiguous() and x.nbytes <= self.most_bytes(two_shot=two_shot)
        assert x.is_floating_point() and x.element_size() in (2, 4), x.dtype
        vector = _VECTOR_BYTES // x.element_size()
        step = vector * self._size
        if x.numel() % vector:
            vector = 1
        programs = min(PROGRAMS, -(-x.nbytes // min(_LEAST_BYTES, self._room(two_shot))))
        each = -(-x.numel() // (programs * step)) * step
        _rank_sum_kernel[(programs,)](
            x, self._peers, self._calls, self._done[int(two_shot):], self._broken, x.numel() // vector, each // vector,
            self._rank, tries, SIZE=self._size, TWO=two_shot, AREA_BYTES=self._area, PROGRAMS=PROGRAMS, VECTOR=vector,
            BLOCK=_BLOCK, WIDE=_WIDE, FOREVER=WAIT_FOREVER, num_warps=8,
        )  # fmt: skip

    def takes_rows(self, x: Tensor, residual: Tensor, *, two_shot: bool) -> bool:
        """Whether :meth:`add_normed` takes these: rows of whole vectors, as many as there is room for, all of one dtype."""
        if x.shape[-1] * x.element_size() % _VECTOR_BYTES or x.dtype != residual.dtype:
            return False
        split, part, steps = self._parts(x)
        count = -(-len(x) // steps)
        places = count + self._size * -(-count // self._size) if two_shot else count * self._size
        fits = places * part * x.element_size() <= self._area and count * split <= _SQUARES
        return fits and x.is_contiguous() and residual.is_contiguous()

    @staticmethod
    def _parts(x: Tensor) -> tuple[int, int, int]:
        """How many parts a row is in, how many numbers a part has, and of how many rows there are programs."""
        rows, width = x.shape
        vector = _VECTOR_BYTES // x.element_size()
        split = -(-width * x.element_size() // _LEAST_BYTES)
        return split, -(-width // (split * vector)) * vector, min(max(PROGRAMS // split, 1), rows)

    def add_normed(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, two_shot: bool, tries: int = WAIT_FOREVER
    ) -> Tensor:
        """Adds the sum of x over the ranks to the residual, in place; asynchronous on the current stream.

        Args:
            x: [T, N]; it stays as it is.
            residual: [T, N]; :meth:`takes_rows` tells which.
            weight: float32 [N]: the norm's.
            eps: The norm's.
            two_shot: As for :meth:`sum`; a share is parts of some of the rows.
            tries: As for :meth:`sum`.

        Returns:
            [T, N]: ``reference.rms_norm`` of the residual.
        """
        assert self.takes_rows(x, residual, two_shot=two_shot)
        split, part, steps = self._parts(x)
        out = torch.empty_like(x)
        block = triton.next_power_of_2(part)
        _rank_normed_kernel[(steps * split,)](
            x, residual, weight, out, self._peers, self._squares, self._calls, self._done[2 + two_shot:], self._broken, len(x),
            self._rank, tries, eps, N=x.shape[1], PART=part, SPLIT=split, SIZE=self._size, TWO=two_shot, AREA_BYTES=self._area,
            PROGRAMS=PROGRAMS, BLOCK=block, FOREVER=WAIT_FOREVER,
            num_warps=min(max(block * x.element_size() // 512, 1), 8),
            **dependent_launch.options(x),
        )  # fmt: skip
        return out

    def calls(self, *, two_shot: bool, normed: bool = False) -> int:
        """How often the device has summed in this way; waits for the current stream."""
        return int(self._done[2 * normed + two_shot])

    def broken(self) -> bool:
        """Whether a sum was given up; waits for the device."""
        return bool(self._broken.item())
