"""Products with grouped weights in torch, for any device, and by torch's own kernel of 4-bit groups on CPUs."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from sapwood_kernels.quantised.grouped import GroupedWeight, dequantise

Product = Callable[[Tensor], Tensor]
"""``x @ weight.T``: [T, K] -> [T, N], in x's dtype."""

_CHUNK = 1 << 20
"""Numbers of the weight that are widened at a time."""
_PACKED_GROUPS = (32, 64, 128, 256)
_PACKED_ROWS = 16


def plain_product(weight: GroupedWeight) -> Product:
    """Widens a few rows of the weight at a time and multiplies with them."""
    step = max(_CHUNK // weight.columns, 1)

    def product(x: Tensor) -> Tensor:
        if weight.order is not None:
            x = x.index_select(1, weight.order)
        wide = x.float()
        parts = [
            F.linear(wide, dequantise(weight.some(slice(first, first + step)), ordered=False))
            for first in range(0, weight.rows, step)
        ]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).to(x.dtype)

    return product


def can_pack(weight: GroupedWeight) -> bool:
    """Whether :class:`PackedGroups` serves this weight, which is on a CPU."""
    fits = weight.rows % _PACKED_ROWS == 0 and weight.columns % weight.group == 0
    return (
        weight.bits == 4 and weight.table is None and weight.factors is None and fits and weight.group in _PACKED_GROUPS
    )


class PackedGroups:
    """The product with a weight of 4-bit groups, held in the layout of torch's kernel: in float32 throughout.

    Args:
        weight: On a CPU; may be freed.
    """

    def __init__(self, weight: GroupedWeight) -> None:
        codes = torch.stack((weight.codes & 15, weight.codes >> 4), -1).flatten(1).int()
        self._packed = torch._convert_weight_to_int4pack_for_cpu(codes, 2)
        scales = weight.scales.float()
        zeros = torch.zeros_like(scales) if weight.zeros is None else weight.zeros.float()
        # The kernel takes (code - 8) * scale + zero.
        self._scales = torch.stack((scales, (8 - zeros) * scales), -1).transpose(0, 1).contiguous()
        self._group = weight.group
        self._order = weight.order

    def __call__(self, x: Tensor) -> Tensor:
        """Multiplies x: [T, K] -> [T, N]."""
        if self._order is not None:
            x = x.index_select(1, self._order)
        result = torch._weight_int4pack_mm_for_cpu(x.float().contiguous(), self._packed, self._group, self._scales)
        return result.to(x.dtype)
