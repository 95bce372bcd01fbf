"""Weights in the block formats of GGUF files, multiplied as they are stored: mapped from the file, which processes share."""

from __future__ import annotations

import torch
from torch import Tensor

from sapwood_kernels.native.products import SMALL, TYPES
from sapwood_kernels.ops.device import DeviceOps, Gate, Norm, StoredProduct
from sapwood_worker.model.quantization.linear_method import Fuses, LinearFormat, LinearShape, Stored, TableMethod
from sapwood_worker.model.weight_slot import WeightSlot, WeightSlots


class GgufMethod(TableMethod):
    """Multiplies blocks with float32 activations, as exactly as the float32 numbers that they stand for.

    Args:
        shape: The layer's.
        blocks: For each part the bytes of its rows and columns.
        product: The device's product with them.
        dtype: The dtype of activations and bias.
    """

    def __init__(self, shape: LinearShape, blocks: list[Tensor], product: StoredProduct, dtype: torch.dtype) -> None:
        self._shape = shape
        self._blocks = blocks
        self._product = product
        self._dtype = dtype
        self.bias = torch.empty(shape.rows, dtype=dtype) if shape.bias else None

    def slots(self) -> WeightSlots:
        slots: WeightSlots = {}
        start = 0
        for part, blocks in zip(self._shape.parts, self._blocks, strict=True):
            spans = (part.rows, self._shape.columns)
            slots[f"{part.name}.weight"] = WeightSlot(blocks, spans=spans, filled=True)
            if self.bias is not None:
                rows = slice(start, start + part.rows.size)
                slots[f"{part.name}.bias"] = WeightSlot(self.bias[rows], spans=(part.rows,))
            start += part.rows.size
        return slots

    def finish(self) -> None:
        """There is nothing to ready."""

    def fuses(self, rows: int) -> Fuses:
        few = rows <= SMALL and self._dtype == torch.float32
        return Fuses(norm=few, gate_after=few and self.bias is None)

    def apply(
        self,
        x: Tensor,
        *,
        norm: Norm | None = None,
        gate_before: Gate | None = None,
        gate_after: Gate | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        before = None if norm is None else (norm.weight, norm.eps)
        result = self._product(x.float(), norm=before, gate=gate_after).to(self._dtype)
        return result if self.bias is None else result.add_(self.bias)

    def rows(self, ids: Tensor) -> Tensor:
        return self._product.rows(ids).to(self._dtype)


def _kept(shape: LinearShape, dtype: torch.dtype, ops: DeviceOps, stored: Stored) -> GgufMethod | None:
    blocks, kinds = [], []
    for part in shape.parts:
        weight = stored.tensors.get(f"{part.name}.weight")
        if weight is None or weight.blocks is None or weight.dtype not in TYPES:
            return None
        _, per_block, block_bytes = TYPES[weight.dtype]
        columns = shape.columns
        if columns.start % per_block or columns.size % per_block:
            return None
        cut = slice(columns.start // per_block * block_bytes, (columns.start + columns.size) // per_block * block_bytes)
        blocks.append(weight.blocks()[part.rows.slice, cut])
        kinds.append(weight.dtype)
    product = ops.gguf_product(list(zip(kinds, blocks, strict=True)), shape.columns.size)
    return None if product is None else GgufMethod(shape, blocks, product, dtype)


GGUF = LinearFormat(keep=_kept, keep_table=_kept, widens=True)
