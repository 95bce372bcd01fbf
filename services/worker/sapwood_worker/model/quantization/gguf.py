"""Weights in the block formats of GGUF files. On a CPU they are multiplied as they are stored: mapped from the file, which
processes share. Where kernels read groups of few bits (a GPU), the same numbers are put in groups as they are loaded."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from sapwood_kernels.native.products import ALL, SMALL, TABLES, TYPES
from sapwood_kernels.ops.contracts import Gate, Norm, StoredProduct
from sapwood_kernels.ops.device import DeviceOps
from sapwood_kernels.quantised.gguf_groups import grouped_blocks
from sapwood_kernels.quantised.grouped import GroupedWeight
from sapwood_worker.model.quantization.grouped import GroupedMethod, GroupedPart
from sapwood_worker.model.quantization.linear_method import (
    Fuses,
    LinearFormat,
    LinearMethod,
    LinearShape,
    Stored,
    TableMethod,
)
from sapwood_worker.model.weight_slot import WeightSlot, WeightSlots


class GgufMethod(TableMethod):
    """Multiplies blocks with float32 activations, as exactly as the float32 numbers that they stand for.

    A table (the output head) may round them to 16 bits.

    Args:
        shape: The layer's.
        blocks: For each part the bytes of its rows and columns.
        product: The device's product with them.
        dtype: The dtype of activations and bias.
    """

    renewal = "refuse"  # its slots are the file itself

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


def _blocks(shape: LinearShape, stored: Stored) -> list[tuple[str, Tensor]] | None:
    """For each part its type and the bytes of its rows and columns; None: not all are stored in blocks that are whole here."""
    found = []
    for part in shape.parts:
        weight = stored.tensors.get(f"{part.name}.weight")
        if weight is None or weight.blocks is None or weight.dtype not in TYPES | TABLES:
            return None
        _, per_block, block_bytes = ALL[weight.dtype]
        columns = shape.columns
        if columns.start % per_block or columns.size % per_block:
            return None
        cut = slice(columns.start // per_block * block_bytes, (columns.start + columns.size) // per_block * block_bytes)
        found.append((weight.dtype, weight.blocks()[part.rows.slice, cut]))
    return found


def _kept_blocks(
    shape: LinearShape, dtype: torch.dtype, ops: DeviceOps, stored: Stored, *, table: bool = False
) -> GgufMethod | None:
    parts = None if ops.multiplies_groups else _blocks(shape, stored)
    product = None if parts is None else ops.gguf_product(parts, shape.columns.size, digits=2 if table else 3)
    if parts is None or product is None:
        return None
    return GgufMethod(shape, [blocks for _, blocks in parts], product, dtype)


def _kept(shape: LinearShape, dtype: torch.dtype, ops: DeviceOps, stored: Stored) -> LinearMethod | None:
    if not ops.multiplies_groups:
        return _kept_blocks(shape, dtype, ops, stored)
    parts = _blocks(shape, stored)
    if parts is None:
        return None
    made = []
    for part, (kind, blocks) in zip(shape.parts, parts, strict=True):
        slot = WeightSlot(blocks, spans=(part.rows, shape.columns), filled=True)
        weight = partial(_grouped, kind, blocks, shape.columns.size, ops)
        made.append(GroupedPart({f"{part.name}.weight": slot}, weight))
    return GroupedMethod(shape, made, dtype, ops, stored)


def _grouped(kind: str, blocks: Tensor, columns: int, ops: DeviceOps) -> GroupedWeight:
    return grouped_blocks(kind, blocks.to(ops.device), columns)


def _kept_expert(shape: LinearShape, dtype: torch.dtype, ops: DeviceOps, stored: Stored) -> LinearMethod | None:
    """As :func:`_kept`; a GPU's product of all experts takes projections of one type, others are widened."""
    kinds = {each.dtype for part in shape.parts if (each := stored.tensors.get(f"{part.name}.weight")) is not None}
    if ops.groups_experts and len(kinds) > 1:
        return None
    return _kept(shape, dtype, ops, stored)


GGUF = LinearFormat(keep=_kept, keep_table=partial(_kept_blocks, table=True), keep_expert=_kept_expert, widens=True)
