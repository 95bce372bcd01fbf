"""Triton: programs of several ranks that meet over memory that each rank can write to."""

from __future__ import annotations

import triton
import triton.language as tl

PROGRAMS = 64
"""Programs of a call, at most: fewer than a GPU has multiprocessors, so that all run at once."""
WAIT_FOREVER = (1 << 31) - 1
"""Looks for signals that are never over: 32 bits, so that no other kernel is compiled for it."""


@triton.jit
def meet(peers, broken, rank, program, count, most, SIZE: tl.constexpr, FOREVER: tl.constexpr):
    """Waits until this program has reached ``count`` on all ranks; their earlier writes are then visible."""
    ranks = tl.arange(0, triton.next_power_of_2(SIZE))  # a lane for each
    there = ranks < SIZE
    tl.debug_barrier()
    theirs = tl.load(peers + ranks, mask=there, other=0).to(tl.pointer_type(tl.int64)) + program * SIZE + rank
    tl.atomic_xchg(theirs, tl.zeros(ranks.shape, tl.int64) + count, mask=there, sem="release", scope="sys")
    signals = tl.load(peers + rank).to(tl.pointer_type(tl.int64)) + program * SIZE + ranks
    late, tries = 1, 0
    while (late > 0) & ((tries <= most) | (most == FOREVER)):
        seen = tl.atomic_add(signals, tl.zeros(ranks.shape, tl.int64), mask=there, sem="acquire", scope="sys")
        late = tl.max((there & (seen < count)).to(tl.int32), axis=0)
        tries += 1
    if late > 0:
        tl.store(broken, 1)
    tl.debug_barrier()


def signal_bytes(programs: int, size: int) -> int:
    """Bytes at the beginning of a rank's region where the programs of this many ranks leave their signals."""
    return -(-programs * size * 8 // 256) * 256
