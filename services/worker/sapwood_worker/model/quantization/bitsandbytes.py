"""Checkpoints of bitsandbytes: 4 bits by a table (NF4, FP4), and int8 by rows.

Of 4 bits: ``weight`` holds the codes of the flattened matrix, two in a byte with the first in the high half; ``weight.absmax``
the scale of each block of it, in float32, or in 8 bits that ``weight.nested_*`` widen; ``weight.quant_map`` the table;
``weight.quant_state.bitsandbytes__nf4`` the sizes, as JSON. Of int8: ``weight`` [N, K] and ``SCB`` [N], 127 times the scales.
A rank that has a part of the inputs reads the whole weight first.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from sapwood_kernels.ops.device import DeviceOps
from sapwood_kernels.quantised.grouped import GroupedWeight
from sapwood_worker.model.quantization.grouped import GroupedMethod, GroupedPart
from sapwood_worker.model.quantization.linear_method import LinearFormat, LinearMethod, LinearShape, Part, Stored
from sapwood_worker.model.quantization.packing import stored_slot
from sapwood_worker.model.weight_slot import Span, WeightSlots, whole

_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
_LARGEST = 127.0
_STORAGE = {"U8": 1, "BF16": 2, "F16": 2, "F32": 4}
"""Bytes of an element of ``weight``: codes may be stored as if they were other numbers (``bnb_4bit_quant_storage``)."""


def _keep(shape: LinearShape, dtype: torch.dtype, ops: DeviceOps, stored: Stored) -> LinearMethod | None:
    if stored.quant_method != "bitsandbytes":
        return None
    parts = [_part(part, shape.columns, stored, ops.device) for part in shape.parts]
    kept = [part for part in parts if part is not None]
    return GroupedMethod(shape, kept, dtype, ops, stored) if len(kept) == len(parts) else None


def _part(part: Part, columns: Span, stored: Stored, device: torch.device) -> GroupedPart | None:
    if f"{part.name}.SCB" in stored.tensors:
        return _int8(part, columns, stored, device)
    state = next((f"{part.name}.{each}" for each in _STATES if f"{part.name}.{each}" in stored.tensors), None)
    return None if state is None else _by_table(part, state, columns, stored, device)


def _int8(part: Part, columns: Span, stored: Stored, device: torch.device) -> GroupedPart:
    name, scale, layout = (f"{part.name}.{kind}" for kind in ("weight", "SCB", "weight_format"))
    slots: WeightSlots = {
        name: stored_slot(stored, name, part.rows, columns, device=device),
        scale: stored_slot(stored, scale, part.rows, device=device),
    }
    if layout in stored.tensors:
        slots[layout] = stored_slot(stored, layout, *map(whole, stored.tensors[layout].shape), device=device)

    def weight() -> GroupedWeight:
        if layout in slots and int(slots[layout].target.max()) != 0:
            raise stored.refusal(layout, "only the layout row (0) can be read")
        codes = (slots[name].target.short() + 128).to(torch.uint8)
        scales = (slots[scale].target / _LARGEST).view(-1, 1)
        zeros = torch.full_like(scales, 128, dtype=torch.uint8)
        return GroupedWeight(codes, scales, columns.size, columns.size, bits=8, zeros=zeros)

    return GroupedPart(slots, weight)


def _by_table(part: Part, state: str, columns: Span, stored: Stored, device: torch.device) -> GroupedPart:
    name = f"{part.name}.weight"
    size = part.rows.total * columns.total
    slots: WeightSlots = {state: stored_slot(stored, state, *map(whole, stored.tensors[state].shape), device=device)}
    found = stored.tensors.get(name)
    each = 2 * (1 if found is None else _STORAGE.get(found.dtype, 1))
    slots[name] = stored_slot(stored, name, whole(size // each), whole(1), device=device)
    for kind in ("absmax", "quant_map", "nested_absmax", "nested_quant_map"):
        if f"{name}.{kind}" in stored.tensors or kind in ("absmax", "quant_map"):
            found = stored.tensors.get(f"{name}.{kind}")
            spans = () if found is None else tuple(map(whole, found.shape))
            slots[f"{name}.{kind}"] = stored_slot(stored, f"{name}.{kind}", *spans, device=device)

    def filled(kind: str) -> Tensor:
        return slots[f"{name}.{kind}"].target

    def weight() -> GroupedWeight:
        settings = _settings(stored, state, slots[state].target)
        block = int(settings["blocksize"])
        if columns.total % block or len(filled("absmax")) != size // block:
            raise stored.refusal(name, f"its blocks of {block} numbers do not end with its rows of {columns.total}")
        scales = filled("absmax")
        if f"{name}.nested_absmax" in slots:
            wide = filled("nested_quant_map")[scales.int()]
            nested = filled("nested_absmax").repeat_interleave(int(settings["nested_blocksize"]))[: len(wide)]
            scales = wide * nested + float(settings["nested_offset"])
        if columns.start % block or columns.size % block:
            raise stored.refusal(name, f"ranks cannot share it: a part begins in the middle of {block} numbers")
        codes = slots[name].target.view(torch.uint8).view(part.rows.total, -1)[part.rows.slice]
        codes = codes[:, columns.start // 2 : (columns.start + columns.size) // 2]
        first = columns.start // block
        scales = scales.view(part.rows.total, -1)[part.rows.slice][:, first : first + columns.size // block]
        return GroupedWeight(
            codes=codes << 4 | codes >> 4,
            scales=scales.contiguous(),
            group=block,
            columns=columns.size,
            bits=4,
            table=filled("quant_map").float().clone(),
        )

    return GroupedPart(slots, weight)


def _settings(stored: Stored, name: str, content: Tensor) -> dict[str, Any]:
    try:
        settings = json.loads(bytes(content.cpu().tolist()))
        wanted = {"blocksize": settings["blocksize"]}
        if "nested_blocksize" in settings:
            wanted |= {key: settings[key] for key in ("nested_blocksize", "nested_offset")}
    except (ValueError, KeyError, TypeError) as error:
        raise stored.refusal(name, f"holds no sizes: {error}") from error
    return wanted


BITSANDBYTES = LinearFormat(keep=_keep, quant_methods=("bitsandbytes",))
