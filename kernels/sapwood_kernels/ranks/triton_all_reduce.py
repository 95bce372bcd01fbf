"""Triton: sums over ranks whose memory each of them can write to, as one host's GPUs can over NVLink, by CUDA IPC.

A sum is pushed: each rank writes its numbers into a place of its own in every rank's region, and looks at its own region until
all have come. A number says by itself that it is there: places are zero, and what is written is a number's bits, inverted, of
which zero alone, a NaN, goes as another NaN. So there are no signals and no fences; whoever has read a place zeroes it. Places
have two sides that take turns, each program's by its own count of calls, in device memory, so that CUDA graphs go on where other
calls ended. A rank that writes to a side for the second time has got all ranks' numbers of the call between, which they wrote
after the kernel in which they read and zeroed that side; so every call finds its side zero, whatever the layouts of both.

One-shot, each rank gets all numbers and adds them up; two-shot, it gets a share of them, and sends its sums to all. Both add up
in the order of the ranks in float32 and round once: their sums are equal to the bit, on all ranks. Where the sum is added to a
residual that is normed next, a program takes whole rows and does all of it: neither the sum nor the residual is read again.

Bound: for small tensors the time in which a write comes to the other GPUs, twice that two-shot; for large ones the link, which
carries ``size - 1`` times the tensor one-shot and ``2 * (size - 1) / size`` times two-shot. Numbers that are their own signals
are an idea of NCCL's and TensorRT-LLM's; no multicast is used.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sapwood_kernels.ranks.triton_meeting import WAIT_FOREVER

PROGRAMS = 128
"""Programs of a call, at most: fewer than a GPU has multiprocessors, so that all run at once."""
_BLOCK = 2048
_LEAST_BYTES = 4096
"""Bytes of a program's piece below which there are fewer programs."""
_VECTOR_BYTES = 16
_WARPS = 8
_AREA = 4
"""Times the largest tensor that a side of a region has room for."""


@triton.jit
def _side(peers, rank, program, call, BITS: tl.constexpr, AREA_BYTES: tl.constexpr, PROGRAMS: tl.constexpr):
    """Where a program's numbers come to in a rank's region in this call."""
    place = ((call & 1) * PROGRAMS + program) * AREA_BYTES
    return tl.multiple_of((tl.load(peers + rank) + place).to(tl.pointer_type(BITS)), 16)


@triton.jit
def _sent(values, BITS: tl.constexpr):
    """The bits that numbers are sent as: never zero."""
    bits = ~values.to(BITS, bitcast=True)
    return bits + (bits == 0).to(BITS)


@triton.jit
def _send(
    values, peers, rank, program, call, at, mask, SIZE: tl.constexpr, BITS: tl.constexpr,
    AREA_BYTES: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Writes numbers to these places of all ranks: first to the next, so that not all write to the same one at a time."""
    bits = _sent(values, BITS)
    for step in tl.static_range(SIZE):
        side = _side(peers, (rank + 1 + step) % SIZE, program, call, BITS, AREA_BYTES, PROGRAMS)
        tl.store(side + at, bits, mask=mask)


@triton.jit
def _added(
    own, broken, at, mask, apart, most, KIND: tl.constexpr, BITS: tl.constexpr, PARTS: tl.constexpr, FOREVER: tl.constexpr
):  # fmt: skip
    """float32: the numbers that come to these places, and to those ``apart`` further, added up in this order."""
    total, least = tl.zeros(at.shape, tl.float32), tl.zeros(at.shape, BITS)
    missing, tries = 1, 0
    while (missing > 0) & ((tries < most) | (most == FOREVER)):
        for part in tl.static_range(PARTS):
            bits = tl.load(own + part * apart + at, mask=mask, other=1, volatile=True)
            least = bits if part == 0 else tl.minimum(least, bits)
            value = (~bits).to(KIND, bitcast=True).to(tl.float32)
            total = value if part == 0 else total + value
        missing = (tl.min(least, axis=0) == 0).to(tl.int32)
        tries += 1
    for part in tl.static_range(PARTS):
        tl.store(own + part * apart + at, tl.zeros(at.shape, BITS), mask=mask)
    if missing > 0:
        tl.store(broken, 1)
    return total


@triton.jit(do_not_specialize=["count", "each", "rank", "most"])
def _sum_kernel(
    x, peers, calls, done, broken, count, each, rank, most,
    SIZE: tl.constexpr, TWO: tl.constexpr, AREA_BYTES: tl.constexpr, PROGRAMS: tl.constexpr,
    VECTOR: tl.constexpr, BLOCK: tl.constexpr, FOREVER: tl.constexpr,
):  # fmt: skip
    KIND: tl.constexpr = x.dtype.element_ty  # noqa: N806
    BITS: tl.constexpr = tl.uint16 if KIND.primitive_bitwidth == 16 else tl.uint32  # noqa: N806
    program = tl.program_id(0)
    call, times = tl.load(calls + program) + 1, tl.load(done) + 1
    most = tl.where(tl.load(broken) == 0, most, 0)  # what comes late would be taken for what comes next
    own = _side(peers, rank, program, call, BITS, AREA_BYTES, PROGRAMS)
    # All in whole vectors, so that the compiler knows that they can be moved at once.
    first = program * each * VECTOR
    vectors = tl.maximum(tl.minimum(each, count - program * each), 0)
    length = vectors * VECTOR
    places = tl.arange(0, BLOCK)
    if TWO:
        share = each // SIZE * VECTOR
        mine = tl.minimum(tl.maximum(length - rank * share, 0), share)
        for start in range(0, share, BLOCK):
            for step in tl.static_range(SIZE):
                peer = (rank + 1 + step) % SIZE
                at = start + places
                inside = at < tl.minimum(length - peer * share, share)
                bits = _sent(tl.load(x + first + peer * share + at, mask=inside), BITS)
                side = _side(peers, peer, program, call, BITS, AREA_BYTES, PROGRAMS)
                tl.store(side + rank * share + at, bits, mask=inside)
        for start in range(0, mine, BLOCK):
            at = start + places
            total = _added(own, broken, at, at < mine, share, most, KIND, BITS, SIZE, FOREVER).to(KIND)
            there = (SIZE + rank) * share + at
            _send(total, peers, rank, program, call, there, at < mine, SIZE, BITS, AREA_BYTES, PROGRAMS)
        for start in range(0, length, BLOCK):
            at = start + places
            summed = _added(own + SIZE * share, broken, at, at < length, 0, most, KIND, BITS, 1, FOREVER)
            tl.store(x + first + at, summed.to(KIND), mask=at < length)
    else:
        room = each * VECTOR
        for start in range(0, length, BLOCK):
            at = start + places
            values = tl.load(x + first + at, mask=at < length)
            _send(values, peers, rank, program, call, rank * room + at, at < length, SIZE, BITS, AREA_BYTES, PROGRAMS)
        for start in range(0, length, BLOCK):
            at = start + places
            total = _added(own, broken, at, at < length, room, most, KIND, BITS, SIZE, FOREVER)
            tl.store(x + first + at, total.to(KIND), mask=at < length)
    tl.store(calls + program, call)
    if program == 0:
        tl.store(done, times)


@triton.jit(do_not_specialize=["rows", "rank", "most"])
def _normed_kernel(
    x, residual, weight, out, peers, calls, done, broken, rows, rank, most, eps,
    N: tl.constexpr, SIZE: tl.constexpr, TWO: tl.constexpr, AREA_BYTES: tl.constexpr, PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr, FOREVER: tl.constexpr,
):  # fmt: skip
    KIND: tl.constexpr = x.dtype.element_ty  # noqa: N806
    BITS: tl.constexpr = tl.uint16 if KIND.primitive_bitwidth == 16 else tl.uint32  # noqa: N806
    program, programs = tl.program_id(0), tl.num_programs(0)
    call, times = tl.load(calls + program) + 1, tl.load(done) + 1
    most = tl.where(tl.load(broken) == 0, most, 0)
    own = _side(peers, rank, program, call, BITS, AREA_BYTES, PROGRAMS)
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    # Rows of a program, and those that one rank sums of them.
    count = (rows + programs - 1) // programs
    share = (count + SIZE - 1) // SIZE
    for row in range(program, rows, programs):
        nth = row // programs
        values = tl.load(x + row * N + columns, mask=inside)
        if TWO:
            side = _side(peers, (program + nth) % SIZE, program, call, BITS, AREA_BYTES, PROGRAMS)
            tl.store(side + (rank * share + nth // SIZE) * N + columns, _sent(values, BITS), mask=inside)
        else:
            at = (rank * count + nth) * N + columns
            _send(values, peers, rank, program, call, at, inside, SIZE, BITS, AREA_BYTES, PROGRAMS)
    if TWO:
        mine = (rank + SIZE - program % SIZE) % SIZE
        for row in range(program + mine * programs, rows, SIZE * programs):
            nth = row // programs
            at = nth // SIZE * N + columns
            total = _added(own, broken, at, inside, share * N, most, KIND, BITS, SIZE, FOREVER).to(KIND)
            there = (SIZE * share + nth) * N + columns
            _send(total, peers, rank, program, call, there, inside, SIZE, BITS, AREA_BYTES, PROGRAMS)
    factors = tl.load(weight + columns, mask=inside, other=0.0)
    for row in range(program, rows, programs):
        nth = row // programs
        before = tl.load(residual + row * N + columns, mask=inside, other=0.0).to(tl.float32)
        if TWO:
            at = (SIZE * share + nth) * N + columns
            total = _added(own, broken, at, inside, 0, most, KIND, BITS, 1, FOREVER)
        else:
            at = nth * N + columns
            total = _added(own, broken, at, inside, count * N, most, KIND, BITS, SIZE, FOREVER)
        # Rounded as often as by a sum, a residual and a norm one after another.
        after = (before + total.to(KIND).to(tl.float32)).to(KIND)
        tl.store(residual + row * N + columns, after, mask=inside)
        values = tl.where(inside, after.to(tl.float32), 0.0)
        scale = tl.rsqrt(tl.sum(values * values, axis=0) / N + eps)
        tl.store(out + row * N + columns, (values * scale * factors).to(KIND), mask=inside)
    tl.store(calls + program, call)
    if program == 0:
        tl.store(done, times)


class PeerSums:
    """Sums over ranks by these kernels.

    Args:
        addresses: Of each rank's region in this process, :meth:`region_bytes` each, zero at first, aligned to 256 bytes.
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
            tries: How often numbers that do not come are looked for before the sum is given up and wrong, as are all after it.
        """
        assert x.is_contiguous() and x.nbytes <= self.most_bytes(two_shot=two_shot)
        assert x.is_floating_point() and x.element_size() in (2, 4), x.dtype
        vector = _VECTOR_BYTES // x.element_size()
        step = vector * self._size
        if x.numel() % vector:
            vector = 1
        programs = min(PROGRAMS, -(-x.nbytes // min(_LEAST_BYTES, self._room(two_shot))))
        each = -(-x.numel() // (programs * step)) * step
        _sum_kernel[(programs,)](
            x, self._peers, self._calls, self._done[int(two_shot):], self._broken, x.numel() // vector, each // vector,
            self._rank, tries, SIZE=self._size, TWO=two_shot, AREA_BYTES=self._area, PROGRAMS=PROGRAMS, VECTOR=vector,
            BLOCK=_BLOCK, FOREVER=WAIT_FOREVER, num_warps=_WARPS,
        )  # fmt: skip

    def takes_rows(self, x: Tensor, residual: Tensor, *, two_shot: bool) -> bool:
        """Whether :meth:`add_normed` takes these: rows of whole vectors, as many as there is room for, all of one dtype."""
        rows, row = len(x), x.shape[-1] * x.element_size()
        most = -(-rows // PROGRAMS)
        places = most + self._size * -(-most // self._size) if two_shot else most * self._size
        fits = row % _VECTOR_BYTES == 0 and places * row <= self._area
        return fits and x.dtype == residual.dtype and x.is_contiguous() and residual.is_contiguous()

    def add_normed(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, two_shot: bool, tries: int = WAIT_FOREVER
    ) -> Tensor:
        """Adds the sum of x over the ranks to the residual, in place; asynchronous on the current stream.

        Args:
            x: [T, N]; it stays as it is.
            residual: [T, N]; :meth:`takes_rows` tells which.
            weight: float32 [N]: the norm's.
            eps: The norm's.
            two_shot: As for :meth:`sum`; a share is some of the rows.
            tries: As for :meth:`sum`.

        Returns:
            [T, N]: ``reference.rms_norm`` of the residual.
        """
        assert self.takes_rows(x, residual, two_shot=two_shot)
        rows, width = x.shape
        out = torch.empty_like(x)
        block = triton.next_power_of_2(width)
        _normed_kernel[(min(PROGRAMS, rows),)](
            x, residual, weight, out, self._peers, self._calls, self._done[2 + two_shot:], self._broken, rows, self._rank, tries,
            eps, N=width, SIZE=self._size, TWO=two_shot, AREA_BYTES=self._area, PROGRAMS=PROGRAMS, BLOCK=block,
            FOREVER=WAIT_FOREVER, num_warps=min(max(block // 512, 1), 16),
        )  # fmt: skip
        return out

    def calls(self, *, two_shot: bool, normed: bool = False) -> int:
        """How often the device has summed in this way; waits for it."""
        return int(self._done[2 * normed + two_shot])

    def broken(self) -> bool:
        """Whether a sum was given up; waits for the device."""
        return bool(self._broken.item())
