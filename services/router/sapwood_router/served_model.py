"""What a worker serves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a worker serves; ``epoch`` differs after a restart, ``max_running`` is 0 if it does not say."""

    model: str
    context_length: int
    vocab_size: int
    page_size: int
    num_pages: int
    epoch: int
    max_running: int = 0
