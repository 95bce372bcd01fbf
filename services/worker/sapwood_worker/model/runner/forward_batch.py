"""The input of one forward pass, flat over requests."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sapwood_worker.model.attention.backend import AttentionBatch


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T tokens, request after request.

    Attributes:
        token_ids: int64 [T].
        positions: int64 [T].
        attention: Which tokens belong to which request, and where the cache keeps their keys and values.
    """

    token_ids: Tensor
    positions: Tensor
    attention: AttentionBatch
