"""Products with weights in few bits: grouped ones in torch, for any device; 4-bit groups and int8 by our kernels on CPUs."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from sapwood_kernels import reference
from sapwood_kernels.native.products import SMALL, GgufProduct, NativeLibrary
from sapwood_kernels.quantised.grouped import GroupedWeight, dequantise
from sapwood_kernels.quantised.int8 import WeightProduct

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


def packed_weight(library: NativeLibrary, weight: Tensor, scales: Tensor) -> WeightProduct:
    """``int8.weight_product`` by the library's kernel of ``Q8_0``, whose blocks of 32 numbers all get the scale of their row.

    Args:
        library: The library.
        weight: int8 [N, K] on a CPU, K a multiple of 32; may be freed.
        scales: float32 [N, 1], which float16 holds.
    """
    rows, columns = weight.shape
    blocks = torch.empty(rows, columns // _BLOCK, 2 + _BLOCK, dtype=torch.uint8)
    blocks[..., :2] = scales.half().view(torch.uint8)[:, None]
    blocks[..., 2:] = weight.view(torch.uint8).view(rows, -1, _BLOCK)
    multiply = GgufProduct(library, [("Q8_0", blocks.flatten(1))], columns, digits=2)

    def product(x: Tensor, /, *, norm: tuple[Tensor, float] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        wide = x.float()
        if norm is not None and len(x) > SMALL:
            wide, norm = reference.rms_norm(wide, *norm), None
        return multiply(wide, norm=norm).to(dtype or x.dtype)

    return product
