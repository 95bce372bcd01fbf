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
    """Returns when this program has come to ``count`` on all ranks; what they wrote before is there."""
    tl.debug_barrier()
    for peer in tl.static_range(SIZE):
        signals = tl.load(peers + peer).to(tl.pointer_type(tl.int64))
        tl.atomic_xchg(signals + program * SIZE + rank, count, sem="release", scope="sys")
    signals = tl.load(peers + rank).to(tl.pointer_type(tl.int64)) + program * SIZE
    for peer in tl.static_range(SIZE):
        seen = tl.atomic_add(signals + peer, 0, sem="acquire", scope="sys")
        tries = 0
        while (seen < count) & ((tries < most) | (most == FOREVER)):
            seen = tl.atomic_add(signals + peer, 0, sem="acquire", scope="sys")
            tries += 1
        if seen < count:
            tl.store(broken, 1)
    tl.debug_barrier()


def signal_bytes(programs: int, size: int) -> int:
    """Bytes at the beginning of a rank's region where the programs of so many ranks leave their signals."""
    return -(-programs * size * 8 // 256) * 256
