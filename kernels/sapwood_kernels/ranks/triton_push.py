"""Triton: numbers that a rank writes into other ranks' memory, and that say by themselves that they are there.

Places are zero until a number comes. A number is sent as its bits, inverted, which are never zero: the one NaN whose inverted
bits are zero goes as another NaN. So a rank looks at its own memory until no place is zero, and then has all numbers, without
signals or fences. Then it zeroes the places.

Each program has an area in every rank's region, with two sides that take turns by the program's own count of calls. When a rank
writes to a side again, it has got all ranks' numbers of the call in between, and each rank sent those after the kernel in which
it read and zeroed that side. So a call finds its side zero, whatever the layouts of both calls.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def side_of(peers, rank, program, call, BITS: tl.constexpr, AREA_BYTES: tl.constexpr, PROGRAMS: tl.constexpr):
    """The place in a rank's region where a program's numbers arrive in this call."""
    place = ((call & 1) * PROGRAMS + program) * AREA_BYTES
    return tl.multiple_of((tl.load(peers + rank) + place).to(tl.pointer_type(BITS)), 16)


@triton.jit
def sent(values, BITS: tl.constexpr):
    """The bits that numbers are sent as: never zero."""
    bits = ~values.to(BITS, bitcast=True)
    return bits + (bits == 0).to(BITS)


@triton.jit
def send(
    values, peers, rank, program, call, at, mask, SIZE: tl.constexpr, BITS: tl.constexpr,
    AREA_BYTES: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Writes numbers to these places of the other ranks, of the next one first, so that not all write to the same at a time."""
    bits = sent(values, BITS)
    for step in tl.static_range(1, SIZE):
        side = side_of(peers, (rank + step) % SIZE, program, call, BITS, AREA_BYTES, PROGRAMS)
        tl.store(side + at, bits, mask=mask)


@triton.jit
def come(side, broken, at, mask, most, KIND: tl.constexpr, BITS: tl.constexpr, FOREVER: tl.constexpr):
    """The numbers that come to these places."""
    bits = tl.zeros(at.shape, BITS)
    missing, tries = 1, 0
    while (missing > 0) & ((tries < most) | (most == FOREVER)):
        bits = tl.load(side + at, mask=mask, other=1, volatile=True)
        missing = (tl.min(bits, axis=0) == 0).to(tl.int32)
        tries += 1
    tl.store(side + at, tl.zeros(at.shape, BITS), mask=mask)
    if missing > 0:
        tl.store(broken, 1)
    return (~bits).to(KIND, bitcast=True)


@triton.jit
def added(
    own, side, broken, at, mask, apart, rank, most, KIND: tl.constexpr, BITS: tl.constexpr, SIZE: tl.constexpr,
    FOREVER: tl.constexpr,
):  # fmt: skip
    """float32: this rank's own numbers and those that come to these places, each rank's ``apart`` from those of the one before,
    added up in the order of the ranks."""
    total, least = tl.zeros(at.shape, tl.float32), tl.zeros(at.shape, BITS)
    here = tl.broadcast_to(rank, at.shape)
    missing, tries = 1, 0
    while (missing > 0) & ((tries < most) | (most == FOREVER)):
        for part in tl.static_range(SIZE):
            bits = tl.load(side + part * apart + at, mask=mask & (here != part), other=1, volatile=True)
            least = bits if part == 0 else tl.minimum(least, bits)
            value = tl.where(here == part, own, (~bits).to(KIND, bitcast=True)).to(tl.float32)
            total = value if part == 0 else total + value
        missing = (tl.min(least, axis=0) == 0).to(tl.int32)
        tries += 1
    for part in tl.static_range(SIZE):
        tl.store(side + part * apart + at, tl.zeros(at.shape, BITS), mask=mask & (here != part))
    if missing > 0:
        tl.store(broken, 1)
    return total
