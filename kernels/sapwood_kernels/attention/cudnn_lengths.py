"""Lengths for which cuDNN plans attention: it takes 35 to 110 ms of the host for each that it has not seen, so they are few."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rounded(length: int) -> int:
    """The tokens that a prompt is filled up to: one of eight lengths between powers of two, which adds an eighth at most."""
    step = 1 << max((length - 1).bit_length() - 4, 0)
    return -(-length // step) * step


def padded(heads: Tensor) -> Tensor:
    """Queries, keys or values [T, H, D] of a whole prompt, filled up with zeros, which no token before them sees."""
    missing = rounded(len(heads)) - len(heads)
    return F.pad(heads, (0, 0, 0, 0, 0, missing)) if missing else heads
