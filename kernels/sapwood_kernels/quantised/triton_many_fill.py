"""Gluon: the warps of ``triton_many`` that fill the ring from which its warp groups multiply: one with codes, before the kernel
ahead has ended, one with inputs, and after a tile's last group with what is added to it.

Both fill a place of the ring, or hand it on empty, before the warp groups take it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_wait

# Triton 3.6 and later ones name these differently.
_fetch = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
if hasattr(gl.shared_memory_descriptor, "reinterpret"):

    @gluon.jit
    def _seen(kept, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
        return kept.reinterpret(dtype, shape, layout)
else:

    @gluon.jit
    def _seen(kept, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
        return kept._reinterpret(dtype, shape, layout)


@gluon.jit
def _share(M, SHARE, N, STEPS, BLOCK_M: gl.constexpr):
    """The number of tiles in a row, and a program's steps: its first one, and the one after its last, counted over all tiles'
    groups."""
    across = (M + BLOCK_M - 1) // BLOCK_M
    start = gl.program_id(0) * SHARE
    return across, start, gl.minimum(start + SHARE, across * (N // 128) * STEPS)


@gluon.jit
def _for_copies(number):
    """Lets bulk copies of a warp see what other programs wrote and it knows to be written."""
    each = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0])) + number
    gl.inline_asm_elementwise("fence.proxy.async; mov.b32 $0, $1;", "=r,r", [each], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _fill_codes(
    words, coded, ready, free, M, SHARE, N, STEPS, BLOCK_M: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Codes, which no kernel ahead writes."""
    across, start, end = _share(M, SHARE, N, STEPS, BLOCK_M)
    turn = 0
    while end > start:
        tile = (end - 1) // STEPS
        first = gl.maximum(tile * STEPS, start) - tile * STEPS
        last = end - tile * STEPS
        first_n = tile // across * 128
        for step in range(first, last):
            stage = turn % STAGES
            mbarrier.wait(free.index(stage), turn // STAGES & 1 ^ 1)
            mbarrier.expect(ready.index(stage), 128 * 64)
            _fetch(words, [first_n, step * 16], ready.index(stage), coded.index(stage))
            turn += 1
        if last == STEPS:
            for _ in range((gl.program_id(0) - tile * STEPS // SHARE) * 2 + 1):
                stage = turn % STAGES
                mbarrier.wait(free.index(stage), turn // STAGES & 1 ^ 1)
                mbarrier.arrive(ready.index(stage), count=1)
                turn += 1
        end -= last - first


@gluon.jit
def _fill_inputs(
    x, out, sums, done, taken, ready, free, M, SHARE, N, STEPS, ADDS, BLOCK_M: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Loads inputs. After a tile's last group it loads the partial sums of earlier programs, in two halves each, and the tensor
    to which the tile is added, if any."""
    sent: gl.constexpr = out.layout
    summed: gl.constexpr = sums.layout
    dtype: gl.constexpr = taken.dtype
    across, start, end = _share(M, SHARE, N, STEPS, BLOCK_M)
    turn = 0
    gdc_wait()
    while end > start:
        tile = (end - 1) // STEPS
        first = gl.maximum(tile * STEPS, start) - tile * STEPS
        last = end - tile * STEPS
        first_m = tile % across * BLOCK_M
        first_n = tile // across * 128
        for step in range(first, last):
            stage = turn % STAGES
            mbarrier.wait(free.index(stage), turn // STAGES & 1 ^ 1)
            mbarrier.expect(ready.index(stage), BLOCK_M * 256)
            _fetch(x, [first_m, step * 128], ready.index(stage), taken.index(stage))
            turn += 1
        if last == STEPS:
            for other in range(tile * STEPS // SHARE, gl.program_id(0)):
                while gl.atomic_add(done + other, 0, sem="acquire") & 3 != 3:
                    pass
                _for_copies(other)
                for half in gl.static_range(2):
                    stage = turn % STAGES
                    mbarrier.wait(free.index(stage), turn // STAGES & 1 ^ 1)
                    mbarrier.expect(ready.index(stage), BLOCK_M * 256)
                    both = _seen(taken.index(stage), gl.float32, [2, BLOCK_M, 32], summed)
                    at = (other * 4 + half * 2) * BLOCK_M
                    _fetch(sums, [at, 0], ready.index(stage), both.index(0))
                    _fetch(sums, [at + BLOCK_M, 0], ready.index(stage), both.index(1))
                    turn += 1
            stage = turn % STAGES
            mbarrier.wait(free.index(stage), turn // STAGES & 1 ^ 1)
            if ADDS != 0:
                mbarrier.expect(ready.index(stage), BLOCK_M * 256)
                halves = _seen(taken.index(stage), dtype, [2, BLOCK_M, 64], sent)
                _fetch(out, [first_m, first_n], ready.index(stage), halves.index(0))
                _fetch(out, [first_m, first_n + 64], ready.index(stage), halves.index(1))
            else:
                mbarrier.arrive(ready.index(stage), count=1)
            turn += 1
        end -= last - first
