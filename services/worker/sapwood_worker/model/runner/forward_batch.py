"""One forward pass's input, flat over requests."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sapwood_worker.model.attention.backend import AttentionBatch


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Tokens of all requests one after the other; T in all, R of them to sample after.

    Attributes:
        token_ids: int64 [T].
        positions: int64 [T].
        attention: Which tokens belong together and where the cache keeps theirs.
        logit_rows: int64 [R]: rows of T whose logits are wanted; None for all.
    """

    token_ids: Tensor
    positions: Tensor
    attention: AttentionBatch
    logit_rows: Tensor | None
