"""Forbids tokens by bit masks. This is the plain-torch reference, and fast enough to be used on a CPU."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def apply_token_bitmask(logits: Tensor, bitmask: Tensor, rows: Tensor | None = None) -> None:
    """Sets the logits of forbidden tokens to minus infinity, in place.

    Args:
        logits: float [R, V]; changed.
        bitmask: int32 [G, W] on the same device: bit ``i % 32`` of word ``i // 32`` says whether token i is allowed; tokens
            beyond ``32 W`` are forbidden.
        rows: int64 [G]: the row of ``logits`` that each mask is for, each once; None: mask g is for row g, and G is R.

    Cost: O(G V) whatever the masks hold. Assumes a little-endian machine, as every one that torch runs on is.
    """
    masks, words = bitmask.shape
    width = logits.shape[1]
    packed = _table(logits.device).index_select(0, bitmask.contiguous().view(torch.uint8).flatten().int())
    forbidden = packed.view(torch.bool).view(masks, words * 32)[:, :width]
    if words * 32 < width:
        forbidden = torch.nn.functional.pad(forbidden, (0, width - words * 32), value=True)
    if rows is None:
        logits.masked_fill_(forbidden, float("-inf"))
    else:
        logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(forbidden, float("-inf")))


@functools.cache
def _table(device: torch.device) -> Tensor:
    """int64 [256]: for each byte of a mask eight booleans of a byte each, true where the token is forbidden."""
    entries = [sum(1 << (8 * bit) for bit in range(8) if not byte >> bit & 1) for byte in range(256)]
    return torch.tensor(entries, dtype=torch.int64, device=device)
