"""The layout of weights that are held in few bits, whatever file format they came in, and its definition in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The 4-bit floats by their codes."""
BLOCK = 128
"""Sides of a block of numbers that share a scale, and inputs that share one."""
Rounding = Literal["row", "block"]
"""By row: inputs have a scale for each row of them, and codes one a row. By block: inputs one for each 128 of a row, and codes
one for each 128 x 128."""


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """A weight [N, K] in codes. Number j of row n is ``((value(code) - zero) * scale - min) * factor``, with the zero, scale and
    min of group ``j // group`` of the row and the factor of the row.

    Attributes:
        codes: [N, K], uint8, int8 or float8_e4m3fn; of 4 bits uint8 [N, ceil(K / 2)], the first of two numbers in the low half.
        scales: [N, G], of any floating type.
        group: Numbers that share a scale; the last group of a row may have fewer.
        columns: K.
        bits: Bits of a code.
        zeros: uint8 [N, G]; None: 0.
        table: float32 [16]: the values of 4-bit codes; None: a code is its own value.
        factors: float32 [N, 1]; None: 1.
        mins: [N, G], of any floating type; None: 0.
        order: int64 [K]: which input number j is multiplied with; None: the j-th.
        rounds: By what scales a product of experts may round inputs to the codes' 8 bits; None: it may not.
    """

    codes: Tensor
    scales: Tensor
    group: int
    columns: int
    bits: Literal[4, 8]
    zeros: Tensor | None = None
    table: Tensor | None = None
    factors: Tensor | None = None
    mins: Tensor | None = None
    order: Tensor | None = None
    rounds: Rounding | None = None

    @property
    def rows(self) -> int:
        """N."""
        return len(self.codes)

    def some(self, rows: slice) -> GroupedWeight:
        """A range of its rows; a view."""
        return replace(
            self,
            codes=self.codes[rows],
            scales=self.scales[rows],
            zeros=None if self.zeros is None else self.zeros[rows],
            factors=None if self.factors is None else self.factors[rows],
            mins=None if self.mins is None else self.mins[rows],
        )


def dequantise(weight: GroupedWeight, *, ordered: bool = True) -> Tensor:
    """The numbers, float32 [N, K].

    Args:
        weight: The weight.
        ordered: Whether column k is what input k is multiplied with; else columns stand as they are held.
    """
    codes = weight.codes
    if weight.bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(1)[:, : weight.columns]
    values = codes.float() if weight.table is None else weight.table[codes.int()]
    if weight.zeros is not None:
        values -= _each(weight.zeros.float(), weight)
    scales = weight.scales.float()
    if weight.factors is not None and weight.mins is None:
        scales = scales * weight.factors
    values *= _each(scales, weight)
    if weight.mins is not None:
        values -= _each(weight.mins.float(), weight)
        values *= 1.0 if weight.factors is None else weight.factors
    if ordered and weight.order is not None:
        values = values[:, weight.order.argsort()]
    return values


def _each(values: Tensor, weight: GroupedWeight) -> Tensor:
    """[N, G] -> [N, K]."""
    if values.shape[1] == 1:
        return values
    return values.repeat_interleave(weight.group, 1)[:, : weight.columns]


def joined(weights: Sequence[GroupedWeight]) -> list[GroupedWeight]:
    """The same rows in as few weights as possible: neighbours of one layout become one."""
    result: list[GroupedWeight] = []
    for each in weights:
        if result and _alike(result[-1], each):
            result[-1] = _stacked(result[-1], each)
        else:
            result.append(each)
    return result


def _alike(one: GroupedWeight, other: GroupedWeight) -> bool:
    settings = [
        (
            each.bits,
            each.group,
            each.codes.dtype,
            each.scales.dtype,
            each.zeros is None,
            each.factors is None,
            each.mins is None,
            each.rounds,
        )
        for each in (one, other)
    ]
    return settings[0] == settings[1] and same_numbers(one.order, other.order) and same_numbers(one.table, other.table)


def same_numbers(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two tensors hold the same, or there is neither."""
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def _stacked(one: GroupedWeight, other: GroupedWeight) -> GroupedWeight:
    def stack(first: Tensor | None, second: Tensor | None) -> Tensor | None:
        return None if first is None or second is None else torch.cat((first, second))

    codes, scales = _rows(one.codes, other.codes), _rows(one.scales, other.scales)
    zeros, factors = stack(one.zeros, other.zeros), stack(one.factors, other.factors)
    return replace(one, codes=codes, scales=scales, zeros=zeros, factors=factors, mins=stack(one.mins, other.mins))


def _rows(one: Tensor, other: Tensor) -> Tensor:
    """Two matrices as one; those that follow each other in memory are not copied."""
    follows = other.storage_offset() == one.storage_offset() + one.numel()
    if follows and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() and one.is_contiguous():
        return one.as_strided((len(one) + len(other), *one.shape[1:]), one.stride())
    if one.itemsize > 1:
        return torch.cat((one, other))
    return torch.cat((one.view(torch.uint8), other.view(torch.uint8))).view(one.dtype)


def pack4(codes: Tensor) -> Tensor:
    """Codes of 4 bits, uint8 [N, K], two in a byte with the first in the low half: [N, ceil(K / 2)]."""
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[:, ::2] | codes[:, 1::2] << 4


def round_to_groups(weight: Tensor, group: int) -> GroupedWeight:
    """Each ``group`` numbers of a row in 4 bits, by a scale and a zero that bring their least and largest to 0 and 15.

    Args:
        weight: [N, K]; K a multiple of ``group``.
        group: Even.
    """
    parts = weight.float().view(len(weight), -1, group)
    least, largest = parts.amin(-1).clamp_(max=0), parts.amax(-1).clamp_(min=0)
    scales = ((largest - least) / 15).clamp_(min=1e-12).to(weight.dtype)
    each = scales.float()
    zeros = (-least / each).round_().clamp_(0, 15)
    codes = (parts / each[..., None] + zeros[..., None]).round_().clamp_(0, 15).to(torch.uint8)
    return GroupedWeight(
        pack4(codes.view(weight.shape)), scales, group, weight.shape[1], bits=4, zeros=zeros.to(torch.uint8)
    )
