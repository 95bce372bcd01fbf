"""AWQ's checkpoints (``version: gemm``): words of eight 4-bit codes across the outputs, in an order of its own.

Of a layer [N, K]: ``qweight`` int32 [K, N / 8], ``qzeros`` int32 [G, N / 8], ``scales`` [G, N].
"""

from __future__ import annotations

import torch
from torch import Tensor

from sapwood_kernels.quantised.grouped import GroupedWeight, pack4
from sapwood_worker.model.quantization.grouped import GroupedPart, words_format
from sapwood_worker.model.quantization.linear_method import Part, Stored
from sapwood_worker.model.quantization.packing import divided, stored_slot, unpacked
from sapwood_worker.model.weight_slot import Span

_EACH = 8
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The places of a word's outputs."""


def _part(part: Part, columns: Span, stored: Stored, device: torch.device) -> GroupedPart:
    codes, zeros, scales = (f"{part.name}.{kind}" for kind in ("qweight", "qzeros", "scales"))
    settings = stored.quantization
    version, bits = str(settings.get("version", "gemm")).lower(), settings.get("bits", settings.get("w_bit", 4))
    if version != "gemm" or bits != 4:
        raise stored.refusal(codes, f"AWQ version {version} of {bits} bits; version gemm of 4 bits can be read")
    wanted = int(settings.get("group_size", settings.get("q_group_size", 128)))
    group = wanted if wanted > 0 else columns.total
    groups = divided(stored, scales, columns, group)
    words = divided(stored, codes, part.rows, _EACH)
    slots = {
        codes: stored_slot(stored, codes, columns, words, device=device),
        zeros: stored_slot(stored, zeros, groups, words, device=device),
        scales: stored_slot(stored, scales, groups, part.rows, device=device),
    }

    def weight() -> GroupedWeight:
        return GroupedWeight(
            codes=pack4(_in_order(slots[codes].target).t()),
            scales=slots[scales].target.t().contiguous(),
            group=group,
            columns=columns.size,
            bits=4,
            zeros=_in_order(slots[zeros].target).t().contiguous(),
        )

    return GroupedPart(slots, weight)


def _in_order(words: Tensor) -> Tensor:
    """The numbers of words [A, N / 8] in the order of outputs: uint8 [A, N]."""
    return unpacked(words, 4, 1).view(len(words), -1, _EACH)[..., list(_PLACES)].flatten(1)


AWQ = words_format(("awq",), _part)
