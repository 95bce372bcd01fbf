"""Triton: the tokens that a step computes, of which the device may know some alone, in one launch: torch's kernels are three.

Bound: reads two numbers of each token, or three, and writes one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 128


@triton.jit(do_not_specialize=["count"])
def _known_kernel(tokens, latest, slots, known, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    token = tl.load(tokens + at, mask=inside, other=0)
    late = inside & (token < 0)
    slot = tl.load(slots + at, mask=late, other=0)
    token = tl.where(late, tl.load(latest + slot, mask=late, other=0), token)
    tl.store(known + at, token, mask=inside)


def known_tokens(tokens: Tensor, latest: Tensor, slots: Tensor) -> Tensor:
    """Computes ``DeviceOps.known_tokens``; all are contiguous."""
    known = torch.empty_like(tokens)
    count = len(tokens)
    _known_kernel[(triton.cdiv(count, _BLOCK),)](tokens, latest, slots, known, count, BLOCK=_BLOCK, num_warps=1)
    return known
