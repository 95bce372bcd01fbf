"""Products with grouped weights in torch, for any device, and by our kernel of 4-bit groups on CPUs."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from sapwood_kernels.native.library import NativeLibrary
from sapwood_kernels.native.products import GgufProduct
from sapwood_kernels.quantised.grouped import GroupedWeight, dequantise

Product = Callable[[Tensor], Tensor]
"""``x @ weight.T``: [T, K] -> [T, N], in x's dtype."""

_CHUNK = 1 << 20
"""Numbers of the weight that are widened at a time."""
_BLOCK, _LARGE = 32, 128
"""Numbers of the library's blocks."""


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
    """Whether :func:`packed_product` serves this weight: 4 bits without a table, in whole blocks."""
    codes = weight.bits == 4 and weight.table is None and weight.factors is None and weight.mins is None
    whole = weight.columns % _BLOCK == 0 and weight.columns % weight.group == 0 and weight.group % _BLOCK == 0
    return codes and whole


def packed_product(library: NativeLibrary, weight: GroupedWeight) -> Product:
    """The product with a weight of 4-bit groups by the library's kernel, in float32 throughout.

    Args:
        library: The library.
        weight: On a CPU, one that :func:`can_pack`; may be freed.
    """
    per = _LARGE if weight.group % _LARGE == 0 else _BLOCK
    rows, count = weight.rows, weight.columns // per
    codes = torch.stack((weight.codes & 15, weight.codes >> 4), -1).view(rows, count, per // _BLOCK, 2, _BLOCK // 2)
    zeros = torch.zeros_like(weight.scales, dtype=torch.uint8) if weight.zeros is None else weight.zeros
    scales = weight.scales.float()
    blocks = torch.zeros(rows, count, 8 + per // 2, dtype=torch.uint8)
    blocks[:, :, :4] = scales.repeat_interleave(weight.group // per, 1)[..., None].view(torch.uint8)
    blocks[:, :, 4] = zeros.repeat_interleave(weight.group // per, 1)
    blocks[:, :, 8:] = (codes[..., 0, :] | codes[..., 1, :] << 4).flatten(2)
    multiply = GgufProduct(library, [(f"G4_{per}", blocks.flatten(1))], weight.columns)
    order = weight.order

    def product(x: Tensor) -> Tensor:
        if order is not None:
            x = x.index_select(1, order)
        return multiply(x.float()).to(x.dtype)

    return product
