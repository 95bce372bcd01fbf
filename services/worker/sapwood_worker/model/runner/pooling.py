"""Pools the hidden states of a prompt's chunk for its embedding."""

from __future__ import annotations

from torch import Tensor


def pool_chunk(hidden: Tensor, pooling: str) -> Tensor:
    """Pools a chunk's hidden states; the scheduler joins the chunks.

    Args:
        hidden: [T, hidden_size], after the final norm.
        pooling: ``mean``, ``last`` or ``cls``.

    Returns:
        float32 [hidden_size]: the sum of all rows, the last row, or the first.
    """
    if pooling == "mean":
        return hidden.float().sum(0)
    return (hidden[-1] if pooling == "last" else hidden[0]).float()
