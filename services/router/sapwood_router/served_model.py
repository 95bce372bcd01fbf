"""What a worker serves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a worker serves; ``epoch`` differs after a restart, ``eos_token_ids`` are the model's own end tokens."""

    model: str
    context_length: int
    vocab_size: int
    page_size: int
    num_pages: int
    epoch: int
    eos_token_ids: frozenset[int] = frozenset()
