"""What a worker says of one request, as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sapwood_router.context import FinishReason


@dataclass(frozen=True, slots=True)
class WorkerOutput:
    """One message's news of a request.

    Attributes:
        token_ids: New tokens; an end token is among them.
        finish: Why the generation ended, on the last one.
        cached_tokens: Prompt tokens found in the worker's prefix cache, where the message says.
    """

    token_ids: Sequence[int]
    finish: FinishReason | None = None
    cached_tokens: int | None = None
