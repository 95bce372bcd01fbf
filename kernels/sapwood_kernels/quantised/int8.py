"""Products of int8 weights and activations in torch: the definition, and what CPUs compute."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 127.0


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [T, K] to int8 by a scale for each, which brings its largest number to 127: int8 [T, K] and float32 [T, 1]."""
    wide = x.float()
    scales = (wide.abs().amax(1, keepdim=True) / LARGEST).clamp_(min=1e-12)
    return (wide / scales).round_().to(torch.int8), scales


def product(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """``x @ (weight * scales).T`` with x rounded to int8 row by row; sums are exact.

    Args:
        x: [T, K].
        weight: int8 [N, K].
        scales: float32 [N, 1].

    Returns:
        [T, N], in x's dtype.
    """
    codes, own = quantise_rows(x)
    sums = torch._int_mm(codes, weight.t())
    return (sums.float() * own * scales.t()).to(x.dtype)
