"""How likely tokens were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Likelihoods(Protocol):
    """The logarithm of a token's probability, and the likeliest tokens in its place, the likeliest first (``worker.proto``)."""

    @property
    def logprob(self) -> float:
        """The token's own."""
        ...

    @property
    def top_ids(self) -> Sequence[int]:
        """The likeliest tokens."""
        ...

    @property
    def top_logprobs(self) -> Sequence[float]:
        """Theirs."""
        ...


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Implements :class:`Likelihoods` for a token of an answer.

    What is known of a prompt's tokens stays in the message that brought it: to make so many objects holds the event loop.
    """

    logprob: float
    top_ids: Sequence[int] = ()
    top_logprobs: Sequence[float] = ()
