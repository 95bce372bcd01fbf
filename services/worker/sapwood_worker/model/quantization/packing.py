"""How formats pack and order numbers of few bits, undone; and slots of words that hold a part of a tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from sapwood_worker.model.quantization.linear_method import Stored
from sapwood_worker.model.weight_slot import Span, WeightSlot, whole

TYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
"""Types that safetensors files name, of the tensors that formats take as they are."""
_WORD = 32


def unpacked(words: Tensor, bits: int, dim: int) -> Tensor:
    """The numbers in int32 words, the lowest bits first, side by side along a dimension; uint8."""
    shifts = torch.arange(0, _WORD, bits, dtype=torch.int32, device=words.device)
    dim %= words.dim()
    view = [1] * (words.dim() + 1)
    view[dim + 1] = len(shifts)
    apart = (words.unsqueeze(dim + 1) >> shifts.view(view)) & ((1 << bits) - 1)
    return apart.to(torch.uint8).flatten(dim, dim + 1)


def stored_slot(stored: Stored, name: str, *spans: Span, device: torch.device) -> WeightSlot:
    """A slot of the stored type for a part of a tensor.

    Raises:
        ConfigError: The tensor is missing, of a type that none of the formats has, or of another shape.
    """
    found = stored.tensors.get(name)
    if found is None:
        raise stored.refusal(name, "the other tensors of its layer need it")
    if found.dtype not in TYPES:
        raise stored.refusal(name, "its type cannot be read")
    shape = tuple(span.total for span in spans)
    if found.shape != shape:
        raise stored.refusal(name, f"its shape should be {list(shape)}")
    empty = torch.empty([span.size for span in spans], dtype=TYPES[found.dtype], device=device)
    return WeightSlot(empty, spans=spans)


def divided(stored: Stored, name: str, span: Span, by: int) -> Span:
    """The words or groups, of ``by`` numbers each, that a part of a dimension lies in. A group of the whole dimension belongs to
    every rank.

    Raises:
        ConfigError: The part begins or ends within one.
    """
    if by >= span.total:
        return whole(1)
    end = span.start + span.size
    if span.start % by or (end % by and end != span.total):
        raise stored.refusal(
            name, f"ranks cannot share it: a part, numbers {span.start} to {end}, divides {by} that belong together"
        )
    return Span(span.start // by, -(-span.size // by), -(-span.total // by))


def column_order(stored: Stored, name: str, groups: Tensor, group: int) -> Tensor | None:
    """The order that makes each group's inputs neighbours (GPTQ's ``desc_act`` and ``actorder``); None: they are neighbours
    already.

    Args:
        stored: What the checkpoint stores.
        name: The name of the tensor of groups.
        groups: Its content: for each column the number of its group, int32 [K].
        group: Columns of a group.

    Raises:
        ConfigError: Groups are of other sizes.
    """
    regular = torch.arange(len(groups), device=groups.device) // group
    if torch.equal(groups.long(), regular):
        return None
    order = groups.long().argsort(stable=True)
    if not torch.equal(groups.long()[order], regular):
        raise stored.refusal(name, f"its groups are not all of {group} columns")
    return order
