"""Triton: copies of the states of slots to other slots, in all layers at once. Bound: reads and writes each byte once, without
memory besides."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _copy_kernel(states, pairs, count, layer_stride, slot_stride, numbers, BLOCK: tl.constexpr):
    pair = tl.program_id(1)
    source, into = tl.load(pairs + pair), tl.load(pairs + count + pair)
    states += tl.program_id(2).to(tl.int64) * layer_stride
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numbers
    content = tl.load(states + source * slot_stride + at, mask=inside)
    tl.store(states + into * slot_stride + at, content, mask=inside)


def copy_states(states: Tensor, pairs: Tensor) -> None:
    """Copies slots.

    Args:
        states: float32 [layers, slots, numbers], the last dimension contiguous. Written in place.
        pairs: int64 [2, N], contiguous: slots that are read, and those that become their copies. Each of the latter once, and
            none of the former.
    """
    layers, _, numbers = states.shape
    _copy_kernel[(triton.cdiv(numbers, _BLOCK), pairs.shape[1], layers)](
        states, pairs, pairs.shape[1], states.stride(0), states.stride(1), numbers, BLOCK=_BLOCK, num_warps=8
    )
