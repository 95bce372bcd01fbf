"""The input of one forward pass, flat over requests."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sapwood_worker.model.attention.backend import AttentionBatch


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T tokens, request after request.

    Attributes:
        lines: int64 [2 + page tables, T]: token ids, positions, and each table's cache slots.
        attention: Which tokens belong to which request, and where the cache keeps their keys and values.
    """

    lines: Tensor
    attention: AttentionBatch

    @property
    def token_ids(self) -> Tensor:
        """int64 [T]."""
        return self.lines[0]

    @property
    def positions(self) -> Tensor:
        """int64 [T]."""
        return self.lines[1]
