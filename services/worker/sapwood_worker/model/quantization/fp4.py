"""Weights in 4-bit floats: MXFP4 and NVFP4 as compressed-tensors and modelopt store them.

A number is one of 16 values (E2M1), two in a byte with the first in the low half. MXFP4 has a power of two for each 32 of a row,
as the exponent in a byte; NVFP4 a float8 for each 16 and one float32 for all, by which compressed-tensors divides
(``weight_global_scale``) and modelopt multiplies (``weight_scale_2``). Activations stay as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sapwood_kernels.ops.device import DeviceOps
from sapwood_kernels.quantised.grouped import E2M1, GroupedWeight
from sapwood_worker.model.quantization.compressed import NAMES as COMPRESSED_NAMES
from sapwood_worker.model.quantization.grouped import GroupedMethod, GroupedPart
from sapwood_worker.model.quantization.linear_method import LinearFormat, LinearMethod, LinearShape, Part, Stored
from sapwood_worker.model.quantization.packing import divided, stored_slot
from sapwood_worker.model.weight_slot import Span, WeightSlots, whole

_GROUPS = {"F8_E4M3": 16, "U8": 32}
"""Numbers that share a scale, by the scales' type."""
_EXPONENT_BITS = 7
"""How many bits of a bfloat16 lie below its exponent."""


def _powers_of_two(exponents: Tensor) -> Tensor:
    """MXFP4's scales, bfloat16: uint8 exponents with a bias of 127."""
    return (exponents.short() << _EXPONENT_BITS).view(torch.bfloat16)


def _keep(shape: LinearShape, dtype: torch.dtype, ops: DeviceOps, stored: Stored) -> LinearMethod | None:
    names = [_codes(part, stored) for part in shape.parts]
    if None in names:
        return None
    parts = [
        _part(part, name, shape.columns, stored, ops.device)
        for part, name in zip(shape.parts, names, strict=True)
        if name is not None
    ]
    return GroupedMethod(shape, parts, dtype, ops, stored)


def _codes(part: Part, stored: Stored) -> str | None:
    scale = stored.tensors.get(f"{part.name}.weight_scale")
    for kind in ("weight_packed", "weight"):
        found = stored.tensors.get(f"{part.name}.{kind}")
        if found is not None and found.dtype == "U8" and scale is not None and scale.dtype in _GROUPS:
            return f"{part.name}.{kind}"
    return None


def _part(part: Part, codes: str, columns: Span, stored: Stored, device: torch.device) -> GroupedPart:
    scale, divisor, factor = (
        f"{part.name}.{kind}" for kind in ("weight_scale", "weight_global_scale", "weight_scale_2")
    )
    group = _GROUPS[stored.tensors[scale].dtype]
    slots: WeightSlots = {
        codes: stored_slot(stored, codes, part.rows, divided(stored, codes, columns, 2), device=device),
        scale: stored_slot(stored, scale, part.rows, divided(stored, scale, columns, group), device=device),
    }
    whole_scale = next((name for name in (divisor, factor) if name in stored.tensors), None)
    if whole_scale is not None:
        spans = tuple(map(whole, stored.tensors[whole_scale].shape))
        slots[whole_scale] = stored_slot(stored, whole_scale, *spans, device=device)
    elif stored.tensors[scale].dtype == "F8_E4M3":
        raise stored.refusal(factor, "NVFP4 has a scale for the whole weight")

    def weight() -> GroupedWeight:
        scales, factors = slots[scale].target, None
        if scales.dtype == torch.uint8:
            scales = _powers_of_two(scales)
        if whole_scale is not None:
            value = slots[whole_scale].target.float().reshape(1, 1)
            factors = (1 / value if whole_scale == divisor else value).expand(part.rows.size, 1).contiguous()
        table = torch.tensor(E2M1, device=device)
        return GroupedWeight(slots[codes].target, scales, group, columns.size, bits=4, table=table, factors=factors)

    return GroupedPart(slots, weight)


FP4 = LinearFormat(keep=_keep, quant_methods=("mxfp4", "modelopt", *COMPRESSED_NAMES))
