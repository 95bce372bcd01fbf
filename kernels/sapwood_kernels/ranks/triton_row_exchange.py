"""Triton: rows that go to all ranks, and sums of a rank's own rows, over memory that each of them can read: CUDA IPC.

Each rank has a region: signals, then two slots that take turns. A program takes a piece of the rows, and meets only the programs
of the same number on the other ranks: it copies the piece to its rank's slot, tells the others, waits for them, and reads their
slots. A rank that writes into a slot again knows that all ranks have read the old content, because all have joined the call
between. Calls are counted in device memory, so that CUDA graphs continue where other calls ended. Rows may have any bits;
sums are added up in the order of the ranks in float32 and rounded once, as all other sums over ranks.

Bound: for few rows the time of one write to the other GPUs and one read; for many the link, which carries the other ranks' rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sapwood_kernels.ranks.triton_meeting import PROGRAMS, WAIT_FOREVER, meet, signal_bytes

_BLOCK = 2048
_LEAST_BYTES = 8192
"""Least bytes of a program's piece: for fewer bytes there are fewer programs."""
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
def _row_exchange_kernel(
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
    # Rows for every rank are summed; a piece has the same number of rows for each.
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


class RowExchange:
    """Rows' ways by these kernels.

    Args:
        addresses: Where each rank's region is mapped in this process. A region has :meth:`region_bytes` bytes, zero at first,
            aligned to 256 bytes.
        rank: This process, from 0.
        most_bytes: Bytes of the largest tensor, a multiple of ``PROGRAMS * 16``.
        device: Where the tensors are.

    Attributes:
        most_bytes: The argument.
    """

    def __init__(self, addresses: list[int], rank: int, most_bytes: int, device: torch.device) -> None:
        self.most_bytes = most_bytes
        self._size, self._rank = len(addresses), rank
        assert most_bytes % (PROGRAMS * _VECTOR_BYTES) == 0, most_bytes
        self._peers = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._calls = torch.zeros(PROGRAMS, dtype=torch.int64, device=device)
        self._done = torch.zeros(1, dtype=torch.int64, device=device)
        self._broken = torch.zeros(1, dtype=torch.int32, device=device)

    @staticmethod
    def region_bytes(most_bytes: int, size: int) -> int:
        """Bytes of a rank's region."""
        return signal_bytes(PROGRAMS, size) + 2 * most_bytes

    def gather(self, x: Tensor, tries: int = WAIT_FOREVER) -> Tensor:
        """All ranks' tensors, [size, ...], given this rank's: contiguous, :attr:`most_bytes` at most; also asynchronous."""
        found = x.new_empty(self._size, *x.shape)
        self._exchange(x, found, x.numel(), sums=False, tries=tries)
        return found

    def scatter_sum(self, x: Tensor, tries: int = WAIT_FOREVER) -> Tensor:
        """This rank's rows of the sum over the ranks, [T, ...], given all rows: [size * T, ...], contiguous, at most
        :attr:`most_bytes` large; also asynchronous."""
        found = x.new_empty(len(x) // self._size, *x.shape[1:])
        self._exchange(x, found, found.numel(), sums=True, tries=tries)
        return found

    def _exchange(self, x: Tensor, found: Tensor, count: int, *, sums: bool, tries: int) -> None:
        """Exchanges rows; each rank has ``count`` numbers of its own."""
        assert x.is_contiguous() and x.nbytes <= self.most_bytes
        vector = _VECTOR_BYTES // x.element_size()
        if count % vector:
            vector = 1
        # A program's piece has vectors of all the rows that are summed.
        piece = self.most_bytes // PROGRAMS // (self._size if sums else 1) // _VECTOR_BYTES * _VECTOR_BYTES
        num_bytes = count * x.element_size()
        programs = min(PROGRAMS, -(-num_bytes // min(_LEAST_BYTES, piece)))
        each = -(-count // (programs * vector))
        _row_exchange_kernel[(programs,)](
            x, found, self._peers, self._calls, self._done, self._broken, count // vector, each,
            self._rank, tries, SIZE=self._size, SUMS=sums, SIGNAL_BYTES=signal_bytes(PROGRAMS, self._size),
            PIECE_BYTES=self.most_bytes // PROGRAMS, PROGRAMS=PROGRAMS, VECTOR=vector, BLOCK=_BLOCK, FOREVER=WAIT_FOREVER,
            num_warps=8,
        )  # fmt: skip

    def calls(self) -> int:
        """How often the device has summed rows; waits for the current stream."""
        return int(self._done)

    def broken(self) -> bool:
        """Whether an exchange was given up; waits for the device."""
        return bool(self._broken.item())
