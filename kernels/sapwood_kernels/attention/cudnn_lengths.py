"""Lengths for which cuDNN plans attention: it takes 35 to 110 ms of the host for each that it has not seen, so they are few.

Plans are a thread's own (torch keeps them so): another thread that met a length before spares this one nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor


def rounded(length: int) -> int:
    """The tokens that a prompt is filled up to: one of eight lengths between powers of two, which adds an eighth at most."""
    step = 1 << max((length - 1).bit_length() - 4, 0)
    return -(-length // step) * step


def lengths(least: int, most: int) -> list[int]:
    """The lengths that prompts of ``least`` to ``most`` tokens are filled up to, ascending."""
    found = [rounded(least)] if least <= most else []
    while found and found[-1] < most:
        found.append(rounded(found[-1] + 1))
    return found


def prefers_cudnn(device: torch.device) -> bool:
    """Whether torch has cuDNN compute causal attention of as many queries as keys: on GPUs from Hopper on."""
    return (
        device.type == "cuda" and torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (9, 0)
    )


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Has torch compute attention by something else."""
    allowed: bool = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(allowed)


def padded(rows: Tensor) -> Tensor:
    """Queries, keys or values [T, H, D] of an unchunked prompt (or their inputs), padded at the end with zeros, which no earlier
    token sees."""
    missing = rounded(len(rows)) - len(rows)
    return F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing)) if missing else rows
