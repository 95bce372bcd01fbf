"""The form in which a row is sent to another rank's experts: unchanged, or in float8."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 128
"""Numbers of a row that share a scale in float8."""


@dataclass(frozen=True, slots=True)
class RowShape:
    """The rows of a model's experts.

    Attributes:
        width: Numbers of a row.
        chosen: Experts that a row goes to.
        experts: Experts of a layer.
        dtype: The dtype of the experts' inputs and outputs.
        float8: Whether rows go to experts in float8; sums come back in ``dtype`` in any case.
    """

    width: int
    chosen: int
    experts: int
    dtype: torch.dtype
    float8: bool = False

    @property
    def groups(self) -> int:
        """Scales of a row in float8."""
        return -(-self.width // GROUP)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row on its way."""
        return self.width + self.groups if self.float8 else self.sum_bytes

    @property
    def sum_bytes(self) -> int:
        """Bytes of what experts made of a row, on its way back."""
        return self.width * self.dtype.itemsize


def to_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in float8, 128 numbers by a power of two that brings the largest of them to 128 or more, and below 256.

    So scaling rounds nothing, and a number keeps 4 significant bits, except that numbers below 2^-14 of the largest keep fewer.

    Args:
        x: [T, N].

    Returns:
        float8_e4m3fn [T, N], and the exponents of the powers that they are to be multiplied with, uint8 [T, N / 128 rounded up],
        127 more than they are.
    """
    groups = _grouped(x.float())
    biased = (groups.abs().amax(-1).view(torch.int32) >> 23).clamp(8) - 7
    return _rounded(groups, biased)[:, : x.shape[1]].contiguous(), biased.to(torch.uint8)


def _rounded(groups: Tensor, biased: Tensor) -> Tensor:
    return (groups * ((254 - biased) << 23).view(torch.float32)[..., None]).to(torch.float8_e4m3fn).flatten(1)


def from_float8(codes: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that :func:`to_float8` has rounded, widened again: [T, N]."""
    scales = (exponents.int() << 23).view(torch.float32)
    return (_grouped(codes.float()) * scales[..., None]).flatten(1)[:, : codes.shape[1]].to(dtype)


def _grouped(x: Tensor) -> Tensor:
    """[T, N] -> [T, groups, 128], filled up with zeros."""
    return F.pad(x, (0, -x.shape[1] % GROUP)).view(len(x), -(-x.shape[1] // GROUP), GROUP)
