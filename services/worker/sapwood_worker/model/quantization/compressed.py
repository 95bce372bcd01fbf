"""Checkpoints of the compressed-tensors library: each module in the scheme of a group, or in none.

A layer's tensors show the format: ``weight_packed`` of int32 holds integers of few bits along the inputs, more by half
their range than they are; ``weight`` int8 or float8 and ``weight_scale`` are plain. Scales are for all, for each output, or for
groups of inputs [N, G]; ``weight_zero_point`` are packed down the outputs; ``weight_g_idx`` is each input's group.
Formats of 4-bit floats are ``fp4``'s, float8 with rounded activations ``float8``'s.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from sapwood_kernels.ops.device import DeviceOps
from sapwood_kernels.quantised.grouped import GroupedWeight, pack4
from sapwood_worker.model.quantization.grouped import GroupedMethod, GroupedPart
from sapwood_worker.model.quantization.int8 import StoredInt8, can_hold
from sapwood_worker.model.quantization.linear_method import LinearFormat, LinearMethod, LinearShape, Part, Stored
from sapwood_worker.model.quantization.packing import column_order, divided, stored_slot, unpacked
from sapwood_worker.model.weight_slot import Span, WeightSlots, whole

NAMES = ("compressed-tensors", "sparseml")
_WORD = 32


def scheme_of(stored: Stored, name: str) -> Mapping[str, Any]:
    """The group of the configuration that a module is in; empty: in none."""
    groups = stored.quantization.get("config_groups") or {}
    by_class: Mapping[str, Any] = {}
    for group in groups.values():
        for target in group.get("targets", ("Linear",)):
            named = re.match(target[3:], name) if target.startswith("re:") else name.endswith(target)
            if named:
                return dict(group)
            if target == "Linear":
                by_class = group
    return by_class


def _keep(shape: LinearShape, dtype: torch.dtype, ops: DeviceOps, stored: Stored) -> LinearMethod | None:
    if stored.quant_method not in NAMES:
        return None
    parts = shape.parts
    rounded = all(scheme_of(stored, part.name).get("input_activations") for part in parts)
    if rounded and all(can_hold(stored, part, shape.columns) for part in parts):
        return StoredInt8(shape, dtype, ops, stored)
    found = [_part(part, shape.columns, stored, ops.device) for part in parts]
    kept = [each for each in found if each is not None]
    return GroupedMethod(shape, kept, dtype, ops, stored) if len(kept) == len(parts) else None


def _part(part: Part, columns: Span, stored: Stored, device: torch.device) -> GroupedPart | None:
    packed = stored.tensors.get(f"{part.name}.weight_packed")
    if packed is not None and packed.dtype == "I32":
        return _packed(part, columns, stored, device)
    weight = stored.tensors.get(f"{part.name}.weight")
    if weight is not None and weight.dtype == "I8":
        return _plain(part, columns, stored, device)
    return None


def _packed(part: Part, columns: Span, stored: Stored, device: torch.device) -> GroupedPart:
    name, scale, zero, order_name, sizes = (
        f"{part.name}.{kind}"
        for kind in ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape")
    )
    bits = _bits(stored, name, columns.total)
    each = _WORD // bits
    group, groups = scale_groups(stored, scale, part, columns)
    slots: WeightSlots = {
        name: stored_slot(stored, name, part.rows, divided(stored, name, columns, each), device=device),
        scale: stored_slot(stored, scale, part.rows, groups, device=device),
    }
    if sizes in stored.tensors:
        slots[sizes] = stored_slot(stored, sizes, whole(2), device=device)
    if zero in stored.tensors:
        slots[zero] = stored_slot(stored, zero, divided(stored, zero, part.rows, each), groups, device=device)
    if order_name in stored.tensors:
        if columns.size < columns.total:
            raise stored.refusal(order_name, "orders inputs of all ranks: such a layer cannot be split by its inputs")
        slots[order_name] = stored_slot(stored, order_name, columns, device=device)

    def weight() -> GroupedWeight:
        order = None
        codes = unpacked(slots[name].target, bits, 1)[:, : columns.size]
        if order_name in slots:
            groups_of = slots[order_name].target
            # All -1: there is no order.
            order = None if int(groups_of.max()) < 0 else column_order(stored, order_name, groups_of, group)
        codes = codes if order is None else codes[:, order]
        scales = slots[scale].target
        if zero in slots:
            zeros = unpacked(slots[zero].target, bits, 0)[: part.rows.size].contiguous()
        else:
            zeros = torch.full(scales.shape, 1 << (bits - 1), dtype=torch.uint8, device=device)
        return GroupedWeight(
            codes=pack4(codes) if bits == 4 else codes.contiguous(),
            scales=scales,
            group=group,
            columns=columns.size,
            bits=bits,
            zeros=zeros,
            order=order,
        )

    return GroupedPart(slots, weight)


def _plain(part: Part, columns: Span, stored: Stored, device: torch.device) -> GroupedPart:
    """int8 whose activations are not rounded, that has zeros, or groups."""
    name, scale, zero = (f"{part.name}.{kind}" for kind in ("weight", "weight_scale", "weight_zero_point"))
    found = stored.tensors.get(scale)
    single = found is not None and found.shape in ((), (1,))
    flat = found is not None and found.shape == (part.rows.total,)
    group, groups = (columns.size, whole(1)) if single or flat else scale_groups(stored, scale, part, columns)
    spans = tuple(map(whole, found.shape)) if single and found else (part.rows,) if flat else (part.rows, groups)
    slots: WeightSlots = {
        name: stored_slot(stored, name, part.rows, columns, device=device),
        scale: stored_slot(stored, scale, *spans, device=device),
    }
    if zero in stored.tensors:
        slots[zero] = stored_slot(stored, zero, *spans, device=device)

    def of_rows(tensor: Tensor) -> Tensor:
        return tensor.reshape(-1, groups.size).expand(part.rows.size, groups.size).contiguous()

    def weight() -> GroupedWeight:
        scales = of_rows(slots[scale].target)
        zeros = torch.full(scales.shape, 128, dtype=torch.uint8, device=device)
        if zero in slots:
            zeros = (of_rows(slots[zero].target).short() + 128).to(torch.uint8)
        codes = (slots[name].target.short() + 128).to(torch.uint8)
        return GroupedWeight(codes, scales, group, columns.size, bits=8, zeros=zeros)

    return GroupedPart(slots, weight)


def scale_groups(stored: Stored, name: str, part: Part, columns: Span) -> tuple[int, Span]:
    """How many inputs share a scale of a tensor [N, G], and the groups of a part of the inputs.

    Raises:
        ConfigError: The tensor is missing, or its groups are not those of the configuration.
    """
    found = stored.tensors.get(name)
    if found is None or len(found.shape) != 2 or found.shape[0] != part.rows.total:
        raise stored.refusal(name, f"a scale for each group of inputs of {part.rows.total} outputs is needed")
    if found.shape[1] == 1:
        return columns.size, whole(1)
    group = -(-columns.total // found.shape[1])
    wanted = (scheme_of(stored, part.name).get("weights") or {}).get("group_size")
    if wanted and wanted > 0 and (wanted != group or -(-columns.total // wanted) != found.shape[1]):
        raise stored.refusal(name, f"its groups are of {group} inputs, group_size is {wanted}")
    return group, divided(stored, name, columns, group)


def _bits(stored: Stored, name: str, columns: int) -> Literal[4, 8]:
    shape = stored.tensors[name].shape
    if len(shape) == 2 and shape[1] == -(-columns * 4 // _WORD):
        return 4
    if len(shape) == 2 and shape[1] == -(-columns * 8 // _WORD):
        return 8
    raise stored.refusal(name, f"of {columns} inputs integers of 4 and 8 bits can be read")


COMPRESSED = LinearFormat(keep=_keep, quant_methods=NAMES)
