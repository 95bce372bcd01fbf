"""Weights in float8 (W8A8): weights are quantised once, or kept as a checkpoint stores them; activations in each call.

There are three ways of scaling. By row: one scale for each output channel of the weight and for each token; finer than by tensor
and, for many tokens, as fast on an H200. By tensor: one scale for the weight and one for all tokens of a step; products of few
tokens are faster, but the scale takes a pass of its own over the activations. By block: one scale for each 128 x 128 numbers of
the weight and each 128 of a token, as in DeepSeek-V3's (2024) checkpoints. Where the device's matrix units do not take such
scales (CUDA: blocks where K / 128 is not a multiple of 4; CPUs: none), the same rounded numbers are multiplied in the model's
dtype: the reference, slow on a GPU, since it widens the weight for each product.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from sapwood_kernels import reference
from sapwood_kernels.ops.contracts import GROUP, Float8, Gate, Norm, OneRow
from sapwood_kernels.ops.device import DeviceOps
from sapwood_kernels.quantised.grouped import GroupedWeight, Rounding
from sapwood_worker.model.quantization.compressed import NAMES as COMPRESSED_NAMES
from sapwood_worker.model.quantization.compressed import scheme_of
from sapwood_worker.model.quantization.dense import ONE_ROW
from sapwood_worker.model.quantization.grouped import GroupedMethod, GroupedPart
from sapwood_worker.model.quantization.linear_method import (
    Fuses,
    LinearFormat,
    LinearMethod,
    LinearShape,
    Part,
    Stored,
)
from sapwood_worker.model.quantization.packing import divided, stored_slot
from sapwood_worker.model.weight_slot import Span, WeightSlot, WeightSlots, whole

Scaling = Literal["row", "block", "tensor"]

_ALIGNED = 16
_WIDEST_ROW = 4096
"""The most inputs of a weight in blocks for which a single row has a kernel of its own. For DeepSeek-V3's wider weights that
kernel took several times as long on an H200 as the device's float8 units take for 64 rows."""
_STORED = "F8_E4M3"
_ACTIVATION_SCHEMES = ("dynamic", "static")
"""Ways in which checkpoints scale activations; both are read, and here each token has a scale of its own."""
_SCALES = ("weight_scale", "weight_scale_inv")
"""Names of a stored weight's scales: the common one, and DeepSeek's for those of blocks."""


class Float8Method(LinearMethod):
    """The product; how the weight comes here is the subclass's business.

    Args:
        shape: The layer's; both sides multiples of 16.
        scaling: Which numbers share a scale; ``block`` only where both sides, and those of each part, are multiples of 128.
        dtype: The dtype of activations and bias.
        ops: The device's operations.

    Attributes:
        weight: [N, K], float8_e4m3fn once it is finished.
        scales: float32 [N, 1], [N / 128, K / 128] by block, or [1, 1] by tensor, once it is finished.
    """

    weight: Tensor
    scales: Tensor

    def __init__(self, shape: LinearShape, scaling: Scaling, dtype: torch.dtype, ops: DeviceOps) -> None:
        self._shape = shape
        self._scaling = scaling
        self._dtype = dtype
        self._ops = ops
        self.bias = torch.empty(shape.rows, dtype=dtype, device=ops.device) if shape.bias else None
        self._one_row: OneRow | None = None
        self._scaled = False
        # torch's product of float8 cannot return float32.
        self._product_dtype = torch.bfloat16 if dtype == torch.float32 else dtype
        self._dense: Tensor | None = None
        fused = scaling != "tensor"  # one scale for all: known only when all numbers are
        self._fuses = Fuses(norm=fused, gate_before=fused)

    def slots(self) -> WeightSlots:
        return self._shape.slots(self.weight, self.bias)

    def fuses(self, rows: int) -> Fuses:
        return ONE_ROW if rows == 1 and self._one_row is not None else self._fuses

    def apply(
        self,
        x: Tensor,
        *,
        norm: Norm | None = None,
        gate_before: Gate | None = None,
        gate_after: Gate | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        if self._one_row is not None and x.shape[0] == 1:
            before = None if norm is None else (norm.weight, norm.eps)
            return self._one_row(x, norm=before, gate=gate_after, add_to=residual)
        ops, grouped = self._ops, self._scaling == "block"
        if norm is not None:
            values, scales = ops.quantise_normed(x, norm.weight, norm.eps, grouped=grouped)
        elif gate_before is not None:
            values, scales = ops.quantise_gated(x, gate_before, grouped=grouped)
        else:
            values, scales = self._quantise(x)
        rows = x.shape[0]  # of the quantised there may be more
        if not self._scaled:
            wide = reference.dequantise_blocks(values[:rows], scales[:rows]).to(self._dtype)
            return F.linear(wide, self._widened() if self._dense is None else self._dense, self.bias)
        # A view or a conversion costs 1 to 2 us even where it changes nothing.
        result = self._scaled_product(values, scales)
        if result.shape[0] != rows:
            result = result[:rows]
        if self._product_dtype is not self._dtype:
            result = result.to(self._dtype)
        return result if self.bias is None else result.add_(self.bias)

    def _ready(self, weight: Tensor, scales: Tensor) -> None:
        if self._scaling == "block":
            # cuBLAS wants rows of a multiple of 4 scales in memory.
            scales = F.pad(scales, (0, -scales.shape[1] % 4))[:, : scales.shape[1]]
        self.weight, self.scales = weight, scales
        self._factor = weight.t(), scales.t()
        each = scales.expand(len(weight), 1).contiguous() if self._scaling == "tensor" else scales
        self._one_row = self._ops.one_row(weight, self.bias, each)
        try:
            zeros = torch.zeros(1, weight.shape[1], dtype=self._dtype, device=weight.device)
            self._scaled_product(*self._quantise(zeros))
            self._scaled = True
            if self._scaling == "block" and weight.shape[1] > _WIDEST_ROW:
                self._one_row = None
        except (RuntimeError, ValueError):
            if not self._ops.asynchronous:  # a GPU's memory holds it once
                self._dense = self._widened()

    def _quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self._scaling == "tensor":
            return self._ops.quantise_tensor(x)
        return self._ops.quantise(x, grouped=self._scaling == "block")

    def _widened(self) -> Tensor:
        return reference.dequantise_blocks(self.weight, self.scales).to(self._dtype)

    def _scaled_product(self, values: Tensor, scales: Tensor) -> Tensor:
        # Products are summed with fewer bits than float32 has; that error is far below float8's rounding.
        exact = self._scaling == "block"
        return self._ops.scaled_product((values, scales), self._factor, self._product_dtype, exact=exact)


class QuantisedFloat8(Float8Method):
    """Loads the weight in the model's dtype and quantises it; arguments as for :class:`Float8Method`."""

    def __init__(self, shape: LinearShape, scaling: Scaling, dtype: torch.dtype, ops: DeviceOps) -> None:
        super().__init__(shape, scaling, dtype, ops)
        self.weight = torch.empty(shape.rows, shape.columns.size, dtype=dtype, device=ops.device)

    def finish(self) -> None:
        self._ready(*self._rounded())

    def grouped(self) -> GroupedWeight | None:
        if self.bias is not None:
            return None
        weight, scales = self._rounded()
        (rows, columns), group = weight.shape, GROUP if self._scaling == "block" else weight.shape[1]
        rounds: Rounding = "block" if self._scaling == "block" else "row"
        if self._scaling != "row":
            scales = scales.repeat_interleave(rows // len(scales), 0)
        return GroupedWeight(weight, scales, group, columns, bits=8, rounds=rounds)

    def _rounded(self) -> Float8:
        quantise = {
            "row": reference.quantise_rows,
            "block": reference.quantise_blocks,
            "tensor": reference.quantise_tensor,
        }
        return quantise[self._scaling](self.weight)


class StoredFloat8(Float8Method):
    """Keeps weight and scales as they are stored; scales of whole projections become scales of rows, equal for each of its rows.

    Args:
        shape: As for :class:`Float8Method`.
        scales: For each part the name of its scales and their shape, all of it.
        scaling: ``row`` or ``block``.
        dtype: As for :class:`Float8Method`.
        ops: As for :class:`Float8Method`.
    """

    def __init__(
        self,
        shape: LinearShape,
        scales: list[tuple[str, tuple[int, ...]]],
        scaling: Scaling,
        dtype: torch.dtype,
        ops: DeviceOps,
    ) -> None:
        super().__init__(shape, scaling, dtype, ops)
        self.weight = torch.empty(shape.rows, shape.columns.size, dtype=torch.float8_e4m3fn, device=ops.device)
        self._scales: WeightSlots = {}
        for part, (name, sizes) in zip(shape.parts, scales, strict=True):
            spans: tuple[Span, ...] = tuple(Span(0, size, size) for size in sizes)
            if scaling == "block":
                spans = _in_blocks(part.rows), _in_blocks(shape.columns)
            elif spans and sizes[0] > 1:
                spans = (part.rows, *spans[1:])
            empty = torch.empty([span.size for span in spans], dtype=torch.float32, device=ops.device)
            self._scales[name] = WeightSlot(empty, spans=spans)

    def slots(self) -> WeightSlots:
        return super().slots() | self._scales

    def finish(self) -> None:
        scales = [slot.target for slot in self._scales.values()]
        if self._scaling == "row":
            rows = [part.rows.size for part in self._shape.parts]
            scales = [each.view(-1, 1).expand(size, 1) for each, size in zip(scales, rows, strict=True)]
        self._ready(self.weight, torch.cat(scales))


def _quantised(shape: LinearShape, dtype: torch.dtype, ops: DeviceOps, *, scaling: Scaling) -> LinearMethod | None:
    if not _can_multiply(shape):
        return None
    if scaling == "block" and not _in_whole_blocks(shape):
        scaling = "row"
    return QuantisedFloat8(shape, scaling, dtype, ops)


def _kept(shape: LinearShape, dtype: torch.dtype, ops: DeviceOps, stored: Stored) -> LinearMethod | None:
    """None if weights are not in float8. Activations stay as they are where the checkpoint does not say that they are rounded,
    and where the device's units do not take the weight's sides or blocks."""
    scales = _scales_of(shape, stored)
    if scales is None:
        return None
    sizes = [stored.tensors[name].shape for name in scales]
    if not _can_multiply(shape) or not all(_rounds_activations(stored, part.name) for part in shape.parts):
        return _weight_only(shape, dtype, ops, stored, scales)
    if all(each in ((), (1,), (1, 1), (part.rows.total,), (part.rows.total, 1))
           for part, each in zip(shape.parts, sizes, strict=True)):  # fmt: skip
        return StoredFloat8(shape, list(zip(scales, sizes, strict=True)), "row", dtype, ops)
    columns = shape.columns.total // GROUP
    in_blocks = all(
        each == (part.rows.total // GROUP, columns) and _block(stored, part.name) == (GROUP, GROUP)
        for part, each in zip(shape.parts, sizes, strict=True)
    )
    if in_blocks and _in_whole_blocks(shape):
        return StoredFloat8(shape, list(zip(scales, sizes, strict=True)), "block", dtype, ops)
    return _weight_only(shape, dtype, ops, stored, scales)


def _kept_expert(shape: LinearShape, dtype: torch.dtype, ops: DeviceOps, stored: Stored) -> LinearMethod | None:
    """Activations stay as they are, but where a GPU's product of all experts rounds them. None, too, where a rank's part begins
    within a block, and where that product does not take the blocks: those are widened."""
    scales = _scales_of(shape, stored)
    if scales is None:
        return None
    for part, name in zip(shape.parts, scales, strict=True):
        _, group = _share(part, shape.columns, name, stored)
        start, end, total = shape.columns.start, shape.columns.start + shape.columns.size, shape.columns.total
        if group < total and (start % group or (end % group and end != total)):
            return None
        if ops.groups_experts and group < total and (group < _ALIGNED or group & (group - 1)):
            return None
    return _weight_only(shape, dtype, ops, stored, scales)


def _scales_of(shape: LinearShape, stored: Stored) -> list[str] | None:
    """The names of each part's scales; None: not all parts are in float8 with scales."""
    scales = []
    for part in shape.parts:
        weight = stored.tensors.get(f"{part.name}.weight")
        name = next((f"{part.name}.{each}" for each in _SCALES if f"{part.name}.{each}" in stored.tensors), None)
        if weight is None or weight.dtype != _STORED or name is None:
            return None
        scales.append(name)
    return scales


def _rounds_activations(stored: Stored, name: str) -> bool:
    if stored.quant_method in COMPRESSED_NAMES:
        return bool(scheme_of(stored, name).get("input_activations"))
    return bool(stored.quantization)


def _weight_only(
    shape: LinearShape, dtype: torch.dtype, ops: DeviceOps, stored: Stored, scales: list[str]
) -> LinearMethod:
    # All rows in one: the parts are not copied to be joined.
    codes = torch.empty(shape.rows, shape.columns.size, dtype=torch.float8_e4m3fn, device=ops.device)
    slots = shape.slots(codes, None).values()
    parts = [_grouped(part, slot, name, stored) for part, slot, name in zip(shape.parts, slots, scales, strict=True)]
    return GroupedMethod(shape, parts, dtype, ops, stored)


def _grouped(part: Part, codes: WeightSlot, scale: str, stored: Stored) -> GroupedPart:
    """One scale for all, for each row, for groups of a row, or for blocks; a rank reads the scales of all rows and takes its
    own."""
    assert codes.spans is not None
    columns, device = codes.spans[1], codes.target.device
    sizes = stored.tensors[scale].shape
    block, group = _share(part, columns, scale, stored)
    spans = [whole(size) for size in sizes]
    if group < columns.total or block > 1:
        spans[1] = divided(stored, scale, columns, group)
        wanted = (-(-part.rows.total // block), -(-columns.total // group))
        if sizes != wanted:
            raise stored.refusal(scale, f"blocks of {block} x {group} need {list(wanted)} scales")
    elif math.prod(sizes) not in (1, part.rows.total):
        raise stored.refusal(
            scale, f"one scale, or one for each of {part.rows.total} outputs, or for blocks can be read"
        )
    slots: WeightSlots = {
        f"{part.name}.weight": codes,
        scale: stored_slot(stored, scale, *spans, device=device),
    }

    def weight() -> GroupedWeight:
        values = slots[scale].target
        groups = values.shape[1] if group < columns.size else 1
        values = values.reshape(-1, groups)
        if len(values) == 1:
            values = values.expand(part.rows.size, groups).contiguous()
        else:
            rows = torch.arange(part.rows.start, part.rows.start + part.rows.size, device=device)
            values = values[rows // block]
        rounds: Rounding | None = None
        if _rounds_activations(stored, part.name):
            whole_blocks = block == group == GROUP and part.rows.start % GROUP == part.rows.size % GROUP == 0
            rounds = "row" if block == 1 and group == columns.total else "block" if whole_blocks else None
        return GroupedWeight(codes.target, values, min(group, columns.size), columns.size, bits=8, rounds=rounds)

    return GroupedPart(slots, weight)


def _share(part: Part, columns: Span, scale: str, stored: Stored) -> tuple[int, int]:
    """How many rows and inputs share one of a part's scales; all inputs, and one row or all: there are no blocks."""
    sizes = stored.tensors[scale].shape
    if len(sizes) != 2 or (sizes[1] == 1 and sizes[0] in (1, part.rows.total)):
        return 1, columns.total
    tall, group = _block(stored, part.name)
    return (1, -(-columns.total // max(sizes[1], 1))) if sizes[0] == part.rows.total else (tall, group)


def _block(stored: Stored, name: str) -> tuple[int, int]:
    """Rows and columns of a block."""
    weights = scheme_of(stored, name).get("weights") or {}
    found = stored.quantization.get("weight_block_size") or weights.get("block_structure")
    if isinstance(found, str):
        found = [int(size) for size in found.split("x")]
    return (int(found[0]), int(found[1])) if found else (GROUP, GROUP)


def _can_multiply(shape: LinearShape) -> bool:
    return shape.rows % _ALIGNED == 0 and shape.columns.size % _ALIGNED == 0


def _in_whole_blocks(shape: LinearShape) -> bool:
    spans = (shape.columns, *(part.rows for part in shape.parts))
    return all(span.start % GROUP == span.size % GROUP == 0 for span in spans)


def _in_blocks(span: Span) -> Span:
    return Span(span.start // GROUP, span.size // GROUP, span.total // GROUP)


def _check(stored: Stored) -> None:
    settings = stored.quantization
    scheme, block = settings.get("activation_scheme"), settings.get("weight_block_size")
    if scheme is not None and scheme not in _ACTIVATION_SCHEMES:
        known = " or ".join(map(repr, _ACTIVATION_SCHEMES))
        raise stored.unknown("activation_scheme", scheme, f"it can be {known}, or left out")
    sizes = block if isinstance(block, list) else []
    if block not in (None, []) and not (len(sizes) == 2 and all(type(size) is int and size > 0 for size in sizes)):
        raise stored.unknown("weight_block_size", block, "it can be the rows and the columns of a block, [128, 128]")


FP8 = LinearFormat(
    quantise=partial(_quantised, scaling="row"),
    keep=_kept,
    keep_expert=_kept_expert,
    widens=True,
    quant_methods=("fp8", "fbgemm_fp8", "modelopt", *COMPRESSED_NAMES),
    check=_check,
)
FP8_BLOCK = LinearFormat(quantise=partial(_quantised, scaling="block"))
FP8_TENSOR = LinearFormat(quantise=partial(_quantised, scaling="tensor"))
