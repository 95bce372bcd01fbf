"""How likely tokens were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Of one token: its logarithm, and the likeliest in its place, the likeliest first. As in ``worker.proto``."""

    logprob: float
    top_ids: Sequence[int] = ()
    top_logprobs: Sequence[float] = ()
