"""Triton: sums over ranks whose memory each of them can read, and rows that go to all: one GPU's ranks by CUDA IPC, over NVLink.

Each rank has a region: signals, then two slots that take turns. A program sums a piece of the tensor, and meets only the
programs of the same number on the other ranks: it copies the piece to its rank's slot, tells the others, waits for them,
and reads their slots. One that writes into a slot for the second time knows that all have read what it wrote first, since
all have come to the call between. Calls are counted in device memory, so that CUDA graphs go on where other calls ended.
One-shot, each rank reads all parts of a piece; two-shot, it reads a share of them, and then the others' sums. Both add up
in the order of the ranks in float32 and round once: their sums are equal to the bit, on all ranks. Where ranks have rows of their
own, they read all ranks' rows, or sum theirs alone: what a rank gets of a sum is equal to the bit, too. Where the sum is added to
a residual that is normed next, a program takes whole rows and does all of it: neither the sum nor the residual is read again.

Bound: for small tensors the time of one write to the other GPUs and one read, twice that two-shot; for large ones the link, which
carries ``size - 1`` times the tensor one-shot and ``2 * (size - 1) / size`` times two-shot. The one-shot idea is that of vLLM's
and TensorRT-LLM's custom all-reduce; no multicast is used.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sapwood_kernels.triton_meeting import PROGRAMS, WAIT_FOREVER, meet, signal_bytes

_BLOCK = 2048
_LEAST_BYTES = 8192
"""Bytes of a program's piece below which there are fewer programs."""
_VECTOR_BYTES = 16


@triton.jit
def _piece(
    peers, rank, program, slot, KIND: tl.constexpr,
    SIGNAL_BYTES: tl.constexpr, PIECE_BYTES: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Where a program's piece is in a slot of a rank."""
    place = SIGNAL_BYTES + (slot * PROGRAMS + program).to(tl.int64) * PIECE_BYTES
    return tl.multiple_of((tl.load(peers + rank) + place).to(tl.pointer_type(KIND)), 16)


@triton.jit
def _added(
    peers, program, slot, at, mask, KIND: tl.constexpr, SIZE: tl.constexpr,
    SIGNAL_BYTES: tl.constexpr, PIECE_BYTES: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """float32: the ranks' numbers at these places of a piece, added up in their order."""
    total = tl.zeros(at.shape, tl.float32)
    for peer in tl.static_range(SIZE):
        part = _piece(peers, peer, program, slot, KIND, SIGNAL_BYTES, PIECE_BYTES, PROGRAMS)
        value = tl.load(part + at, mask=mask, other=0.0).to(tl.float32)
        total = value if peer == 0 else total + value
    return total


@triton.jit(do_not_specialize=["count", "each", "rank", "most"])
def _sum_kernel(
    x, peers, calls, done, broken, count, each, rank, most,
    SIZE: tl.constexpr, TWO: tl.constexpr, SIGNAL_BYTES: tl.constexpr, PIECE_BYTES: tl.constexpr, PROGRAMS: tl.constexpr,
    VECTOR: tl.constexpr, BLOCK: tl.constexpr, FOREVER: tl.constexpr,
):  # fmt: skip
    KIND: tl.constexpr = x.dtype.element_ty  # noqa: N806
    program = tl.program_id(0)
    call = tl.load(calls + program) + 1
    slot = (call & 1).to(tl.int32)
    # All in whole vectors, so that the compiler knows that they can be moved at once.
    first = program * each * VECTOR
    vectors = tl.maximum(tl.minimum(each, count - program * each), 0)
    length = vectors * VECTOR
    own = _piece(peers, rank, program, slot, KIND, SIGNAL_BYTES, PIECE_BYTES, PROGRAMS)
    places = tl.arange(0, BLOCK)
    for start in range(0, length, BLOCK):
        at = start + places
        tl.store(own + at, tl.load(x + first + at, mask=at < length), mask=at < length)
    meet(peers, broken, rank, program, 2 * call, most, SIZE, FOREVER)
    if TWO:
        share = each // SIZE
        last = tl.minimum((rank + 1) * share, vectors) * VECTOR
        for start in range(rank * share * VECTOR, last, BLOCK):
            at = start + places
            total = _added(peers, program, slot, at, at < last, KIND, SIZE, SIGNAL_BYTES, PIECE_BYTES, PROGRAMS)
            tl.store(own + at, total.to(KIND), mask=at < last)  # nobody else has read this share here
        meet(peers, broken, rank, program, 2 * call + 1, most, SIZE, FOREVER)
        for peer in tl.static_range(SIZE):
            part = _piece(peers, peer, program, slot, KIND, SIGNAL_BYTES, PIECE_BYTES, PROGRAMS)
            last = tl.minimum((peer + 1) * share, vectors) * VECTOR
            for start in range(peer * share * VECTOR, last, BLOCK):
                at = start + places
                tl.store(x + first + at, tl.load(part + at, mask=at < last), mask=at < last)
    else:
        for start in range(0, length, BLOCK):
            at = start + places
            total = _added(peers, program, slot, at, at < length, KIND, SIZE, SIGNAL_BYTES, PIECE_BYTES, PROGRAMS)
            tl.store(x + first + at, total.to(KIND), mask=at < length)
    tl.store(calls + program, call)
    if program == 0:
        tl.store(done, tl.load(done) + 1)


@triton.jit(do_not_specialize=["count", "each", "rank", "most"])
def _rows_kernel(
    x, found, peers, calls, done, broken, count, each, rank, most,
    SIZE: tl.constexpr, SUMS: tl.constexpr, SIGNAL_BYTES: tl.constexpr, PIECE_BYTES: tl.constexpr, PROGRAMS: tl.constexpr,
    VECTOR: tl.constexpr, BLOCK: tl.constexpr, FOREVER: tl.constexpr,
):  # fmt: skip
    KIND: tl.constexpr = x.dtype.element_ty  # noqa: N806
    program = tl.program_id(0)
    call = tl.load(calls + program) + 1
    slot = (call & 1).to(tl.int32)
    first = program * each * VECTOR
    length = tl.maximum(tl.minimum(each, count - program * each), 0) * VECTOR
    own = _piece(peers, rank, program, slot, KIND, SIGNAL_BYTES, PIECE_BYTES, PROGRAMS)
    places = tl.arange(0, BLOCK)
    # To be summed are rows for every rank, of which a piece has as many.
    for part in tl.static_range(SIZE if SUMS else 1):
        taken = x + tl.cast(part, tl.int64) * count * VECTOR + first
        for start in range(0, length, BLOCK):
            at = start + places
            tl.store(own + part * each * VECTOR + at, tl.load(taken + at, mask=at < length), mask=at < length)
    meet(peers, broken, rank, program, 2 * call, most, SIZE, FOREVER)
    if SUMS:
        for start in range(0, length, BLOCK):
            at = start + places
            mine = rank * each * VECTOR + at
            total = _added(peers, program, slot, mine, at < length, KIND, SIZE, SIGNAL_BYTES, PIECE_BYTES, PROGRAMS)
            tl.store(found + first + at, total.to(KIND), mask=at < length)
        if program == 0:
            tl.store(done, tl.load(done) + 1)
    else:
        for peer in tl.static_range(SIZE):
            part = _piece(peers, peer, program, slot, KIND, SIGNAL_BYTES, PIECE_BYTES, PROGRAMS)
            given = found + tl.cast(peer, tl.int64) * count * VECTOR + first
            for start in range(0, length, BLOCK):
                at = start + places
                tl.store(given + at, tl.load(part + at, mask=at < length), mask=at < length)
    tl.store(calls + program, call)


@triton.jit(do_not_specialize=["rows", "rank", "most"])
def _normed_kernel(
    x, residual, weight, out, peers, calls, done, broken, rows, rank, most, eps,
    N: tl.constexpr, SIZE: tl.constexpr, TWO: tl.constexpr, SIGNAL_BYTES: tl.constexpr, PIECE_BYTES: tl.constexpr,
    PROGRAMS: tl.constexpr, BLOCK: tl.constexpr, FOREVER: tl.constexpr,
):  # fmt: skip
    KIND: tl.constexpr = x.dtype.element_ty  # noqa: N806
    program, programs = tl.program_id(0), tl.num_programs(0)
    call = tl.load(calls + program) + 1
    slot = (call & 1).to(tl.int32)
    own = _piece(peers, rank, program, slot, KIND, SIGNAL_BYTES, PIECE_BYTES, PROGRAMS)
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    for row in range(program, rows, programs):
        at = row // programs * N + columns
        tl.store(own + at, tl.load(x + row * N + columns, mask=inside), mask=inside)
    meet(peers, broken, rank, program, 2 * call, most, SIZE, FOREVER)
    if TWO:
        for row in range(program, rows, programs):
            if (row + row // programs) % SIZE == rank:
                at = row // programs * N + columns
                total = _added(peers, program, slot, at, inside, KIND, SIZE, SIGNAL_BYTES, PIECE_BYTES, PROGRAMS)
                tl.store(own + at, total.to(KIND), mask=inside)  # nobody else has read this row here
        meet(peers, broken, rank, program, 2 * call + 1, most, SIZE, FOREVER)
    factors = tl.load(weight + columns, mask=inside, other=0.0)
    for row in range(program, rows, programs):
        at = row // programs * N + columns
        if TWO:
            theirs = (row + row // programs) % SIZE
            part = _piece(peers, theirs, program, slot, KIND, SIGNAL_BYTES, PIECE_BYTES, PROGRAMS)
            total = tl.load(part + at, mask=inside, other=0.0).to(tl.float32)
        else:
            total = _added(peers, program, slot, at, inside, KIND, SIZE, SIGNAL_BYTES, PIECE_BYTES, PROGRAMS)
        # Rounded as often as by a sum, a residual and a norm one after another.
        before = tl.load(residual + row * N + columns, mask=inside, other=0.0).to(tl.float32)
        after = (before + total.to(KIND).to(tl.float32)).to(KIND)
        tl.store(residual + row * N + columns, after, mask=inside)
        values = after.to(tl.float32)
        scale = tl.rsqrt(tl.sum(values * values, axis=0) / N + eps)
        tl.store(out + row * N + columns, (values * scale * factors).to(KIND), mask=inside)
    tl.store(calls + program, call)
    if program == 0:
        tl.store(done, tl.load(done) + 1)


class PeerSums:
    """Sums over ranks by these kernels.

    Args:
        addresses: Of each rank's region in this process, :attr:`region_bytes` each, zero at first, aligned to 256 bytes.
        rank: This process, from 0.
        most_bytes: Bytes of the largest tensor, a multiple of ``PROGRAMS * 16 * ranks``.
        device: Where the tensors are.

    Attributes:
        most_bytes: The argument.
    """

    def __init__(self, addresses: list[int], rank: int, most_bytes: int, device: torch.device) -> None:
        self.most_bytes = most_bytes
        self._size, self._rank = len(addresses), rank
        assert most_bytes % (PROGRAMS * _VECTOR_BYTES * self._size) == 0, most_bytes
        self._peers = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._calls = torch.zeros(PROGRAMS, dtype=torch.int64, device=device)
        self._done = torch.zeros(4, dtype=torch.int64, device=device)
        self._broken = torch.zeros(1, dtype=torch.int32, device=device)

    @staticmethod
    def region_bytes(most_bytes: int, size: int) -> int:
        """Bytes of a rank's region."""
        return signal_bytes(PROGRAMS, size) + 2 * most_bytes

    def sum(self, x: Tensor, *, two_shot: bool, tries: int = WAIT_FOREVER) -> None:
        """Sums a contiguous tensor over the ranks, in place; asynchronous on the current stream.

        Args:
            x: At most :attr:`most_bytes` large.
            two_shot: Whether each rank sums a share only, and reads the others' sums.
            tries: How often signals that do not come are looked for before the sum is given up and wrong.
        """
        assert x.is_contiguous() and x.nbytes <= self.most_bytes
        vector = _VECTOR_BYTES // x.element_size()
        step = vector * self._size
        if x.numel() % vector:
            vector = 1
        piece = self.most_bytes // PROGRAMS
        programs = min(PROGRAMS, -(-x.nbytes // min(_LEAST_BYTES, piece)))
        each = -(-x.numel() // (programs * step)) * step
        _sum_kernel[(programs,)](
            x, self._peers, self._calls, self._done[int(two_shot):], self._broken, x.numel() // vector, each // vector,
            self._rank, tries, SIZE=self._size, TWO=two_shot, SIGNAL_BYTES=signal_bytes(PROGRAMS, self._size), PIECE_BYTES=piece,
            PROGRAMS=PROGRAMS, VECTOR=vector, BLOCK=_BLOCK, FOREVER=WAIT_FOREVER, num_warps=8,
        )  # fmt: skip

    def gather(self, x: Tensor, tries: int = WAIT_FOREVER) -> Tensor:
        """All ranks' tensors, [size, ...], given this rank's: contiguous, :attr:`most_bytes` at most; asynchronous likewise."""
        found = x.new_empty(self._size, *x.shape)
        self._exchange(x, found, x.numel(), sums=False, tries=tries)
        return found

    def scatter_sum(self, x: Tensor, tries: int = WAIT_FOREVER) -> Tensor:
        """This rank's rows of the sum over the ranks, [T, ...], given all rows: [size * T, ...], contiguous, at most
        :attr:`most_bytes` large; asynchronous likewise."""
        found = x.new_empty(len(x) // self._size, *x.shape[1:])
        self._exchange(x, found, found.numel(), sums=True, tries=tries)
        return found

    def _exchange(self, x: Tensor, found: Tensor, count: int, *, sums: bool, tries: int) -> None:
        """Exchanges rows, of which each rank has ``count`` numbers of its own."""
        assert x.is_contiguous() and x.nbytes <= self.most_bytes
        vector = _VECTOR_BYTES // x.element_size()
        if count % vector:
            vector = 1
        # A program's piece has vectors of all the rows that are summed.
        piece = self.most_bytes // PROGRAMS // (self._size if sums else 1) // _VECTOR_BYTES * _VECTOR_BYTES
        num_bytes = count * x.element_size()
        programs = min(PROGRAMS, -(-num_bytes // min(_LEAST_BYTES, piece)))
        each = -(-count // (programs * vector))
        _rows_kernel[(programs,)](
            x, found, self._peers, self._calls, self._done, self._broken, count // vector, each,
            self._rank, tries, SIZE=self._size, SUMS=sums, SIGNAL_BYTES=signal_bytes(PROGRAMS, self._size),
            PIECE_BYTES=self.most_bytes // PROGRAMS, PROGRAMS=PROGRAMS, VECTOR=vector, BLOCK=_BLOCK, FOREVER=WAIT_FOREVER,
            num_warps=8,
        )  # fmt: skip

    def takes_rows(self, x: Tensor, residual: Tensor) -> bool:
        """Whether :meth:`add_normed` takes these: rows of whole vectors, as many as there is room for, all of one dtype."""
        rows, row = len(x), x.shape[-1] * x.element_size()
        fits = row % _VECTOR_BYTES == 0 and -(-rows // PROGRAMS) * row <= self.most_bytes // PROGRAMS
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
        assert self.takes_rows(x, residual)
        rows, width = x.shape
        out = torch.empty_like(x)
        block = triton.next_power_of_2(width)
        _normed_kernel[(min(PROGRAMS, rows),)](
            x, residual, weight, out, self._peers, self._calls, self._done[2 + two_shot:], self._broken, rows, self._rank, tries,
            eps, N=width, SIZE=self._size, TWO=two_shot, SIGNAL_BYTES=signal_bytes(PROGRAMS, self._size),
            PIECE_BYTES=self.most_bytes // PROGRAMS, PROGRAMS=PROGRAMS, BLOCK=block, FOREVER=WAIT_FOREVER,
            num_warps=min(max(block // 512, 1), 16),
        )  # fmt: skip
        return out

    def calls(self, *, two_shot: bool, normed: bool = False) -> int:
        """How often the device has summed in this way, rows one-shot; waits for it."""
        return int(self._done[2 * normed + two_shot])

    def broken(self) -> bool:
        """Whether a sum was given up; waits for the device."""
        return bool(self._broken.item())
