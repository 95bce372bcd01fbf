"""Products of int8 weights, with activations in int8 and as they are, in torch: the definition, and what any device computes."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from sapwood_kernels import reference

LARGEST = 127.0
_SCALES = 2.0**-24, 65504.0
"""The least and the largest that float16 holds."""
_CHUNK = 1 << 22
"""Numbers of a weight that are rounded or widened at a time."""


class WeightProduct(Protocol):
    """:func:`weight_product` with a certain weight. Each row of x may be rounded to 16 bits of its largest number."""

    def __call__(
        self, x: Tensor, /, *, norm: tuple[Tensor, float] | None = ..., dtype: torch.dtype | None = ...
    ) -> Tensor: ...


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


def round_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds a weight's rows [N, K] to int8, with a scale for each that float16 can hold: int8 [N, K] and float32 [N, 1].

    The scale is the nearest to what brings a row's largest number to 127. Some rows at a time: a large weight is not copied wide.
    """
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(len(weight), 1, device=weight.device)
    step = max(_CHUNK // weight.shape[1], 1)
    for first in range(0, len(weight), step):
        some = slice(first, first + step)
        wide = weight[some].float()
        each = (wide.abs().amax(1, keepdim=True) / LARGEST).clamp_(*_SCALES)
        scales[some] = each.half()
        codes[some] = (wide / scales[some]).round_().clamp_(-LARGEST, LARGEST)
    return codes, scales


def weight_product(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    *,
    norm: tuple[Tensor, float] | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``norm(x) @ (weight * scales).T`` with x as it is; some rows of the weight are widened at a time.

    Args:
        x: [T, K].
        weight: int8 [N, K].
        scales: float32 [N, 1].
        norm: An RMSNorm's weight, float32 [K], and eps.
        dtype: The result's; None: x's.

    Returns:
        [T, N].
    """
    taken = x.float() if norm is None else reference.rms_norm(x.float(), *norm)
    step = max(_CHUNK // weight.shape[1], 1)
    parts = [F.linear(taken, weight[first : first + step].float()) for first in range(0, len(weight), step)]
    return (torch.cat(parts, 1) * scales.t()).to(dtype or x.dtype)
