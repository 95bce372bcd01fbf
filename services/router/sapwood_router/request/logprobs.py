"""How likely tokens were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The logarithm of a token's probability, and the likeliest tokens in its place, the likeliest first (``worker.proto``)."""

    logprob: float
    top_ids: Sequence[int] = ()
    top_logprobs: Sequence[float] = ()
