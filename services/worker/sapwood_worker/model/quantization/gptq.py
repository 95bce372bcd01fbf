"""GPTQ's checkpoints: words of codes down the inputs, zeros and scales a group, perhaps with the inputs' order of importance.

Of a layer [N, K]: ``qweight`` int32 [K / n, N], with n codes in a word; ``qzeros`` int32 [G, N / n], in version 1 of the format
less one each; ``scales`` [G, N]; ``g_idx`` int32 [K], the group of each input.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from sapwood_kernels.quantised.grouped import GroupedWeight, pack4
from sapwood_worker.model.quantization.grouped import GroupedPart, words_format
from sapwood_worker.model.quantization.linear_method import Part, Stored
from sapwood_worker.model.quantization.packing import column_order, divided, stored_slot, unpacked
from sapwood_worker.model.weight_slot import Span

_WORD = 32
_ONES = {4: 0x11111111, 8: 0x01010101}
"""Words of ones."""


def _part(part: Part, columns: Span, stored: Stored, device: torch.device) -> GroupedPart:
    names = {kind: f"{part.name}.{kind}" for kind in ("qweight", "qzeros", "scales", "g_idx")}
    bits = _bits(stored, names["qweight"], columns.total)
    each = _WORD // bits
    group = _group(stored, names["scales"], columns.total)
    words, groups = divided(stored, names["qweight"], columns, each), divided(stored, names["scales"], columns, group)
    slots = {
        names["qweight"]: stored_slot(stored, names["qweight"], words, part.rows, device=device),
        names["qzeros"]: stored_slot(
            stored, names["qzeros"], groups, divided(stored, names["qzeros"], part.rows, each), device=device
        ),
        names["scales"]: stored_slot(stored, names["scales"], groups, part.rows, device=device),
    }
    has_order = names["g_idx"] in stored.tensors
    if has_order:
        slots[names["g_idx"]] = stored_slot(stored, names["g_idx"], columns, device=device)
    if stored.quantization.get("desc_act") and (not has_order or columns.size < columns.total):
        why = (
            "is missing" if not has_order else "orders inputs of all ranks: such a layer cannot be split by its inputs"
        )
        raise stored.refusal(names["g_idx"], why)

    def weight() -> GroupedWeight:
        filled = {kind: slots[name].target for kind, name in names.items() if name in slots}
        zeros = filled["qzeros"]
        if not _zeros_as_they_are(stored, zeros, bits):
            zeros = zeros + _ONES[bits]  # of the word: a zero of 0 was stored as -1 and borrowed from its neighbour
        codes = unpacked(filled["qweight"], bits, 0).t()
        order = None
        if has_order:
            # A rank's groups count from its first.
            order = column_order(stored, names["g_idx"], filled["g_idx"] - groups.start, group)
        codes = codes if order is None else codes[:, order]
        return GroupedWeight(
            codes=pack4(codes) if bits == 4 else codes.contiguous(),
            scales=filled["scales"].t().contiguous(),
            group=group,
            columns=columns.size,
            bits=bits,
            zeros=unpacked(zeros, bits, 1).t().contiguous(),
            order=order,
        )

    return GroupedPart(slots, weight)


def _zeros_as_they_are(stored: Stored, zeros: Tensor, bits: int) -> bool:
    """Whether zeros are stored as they are, not less one each.

    That is version 2 of the format. GPTQModel 5 writes files of symmetric weights so and calls them version 1: then all zeros are
    the middle, 8 of 4 bits, where version 1 has 7.
    """
    settings = stored.quantization
    if settings.get("checkpoint_format", settings.get("format", "gptq")) == "gptq_v2":
        return True
    middle = _ONES[bits] << (bits - 1)
    middle -= (middle >> (_WORD - 1)) << _WORD  # as int32
    return settings.get("sym") is not False and bool((zeros == middle).all())


def _bits(stored: Stored, name: str, columns: int) -> Literal[4, 8]:
    shape = stored.tensors[name].shape
    for bits in (4, 8):
        if len(shape) == 2 and shape[0] * _WORD == columns * bits:
            return 4 if bits == 4 else 8
    raise stored.refusal(
        name, f"GPTQ of {stored.quantization.get('bits')} bits; of {columns} inputs 4 and 8 bits can be read"
    )


def _group(stored: Stored, name: str, columns: int) -> int:
    found = stored.tensors.get(name)
    if found is None or len(found.shape) != 2 or not found.shape[0]:
        raise stored.refusal(name, "GPTQ has scales for each group of inputs")
    group = -(-columns // found.shape[0])
    wanted = int(stored.quantization.get("group_size", -1))
    if not stored.quantization.get("dynamic") and group != (wanted if wanted > 0 else columns):
        raise stored.refusal(name, f"its groups are of {group} inputs, group_size is {wanted}")
    return group


GPTQ = words_format(("gptq", "gptqmodel"), _part)
