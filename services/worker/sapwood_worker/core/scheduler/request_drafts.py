"""The drafts of one request: who makes them, and how often they were right."""

from __future__ import annotations

from typing import Protocol

_LEARNING = 0.15
"""How much one token changes the rate."""


def learned(rate: float, right: int, wrong: int, weight: float = _LEARNING) -> float:
    """A rate, once so many more tokens were foreseen and so many were not."""
    return (1 - (1 - rate) * (1 - weight) ** right) * (1 - weight) ** wrong


class RowDrafter(Protocol):
    """Guesses the next tokens of one request."""

    def follow(self) -> tuple[int, int]:
        """Takes note of the request's tokens since the last call: how many of them it foresaw, how many it had wrong.

        Tokens for which it had no guess are neither. Whether a guess was drafted makes no difference.
        """
        ...

    def propose(self, unknown: int, most: int) -> list[int]:
        """The tokens that it expects, at most so many, after those that the request has and ``unknown`` further ones; -1 for
        one that it would have to compute."""
        ...


class RequestDrafts:
    """What is known of one request's drafts.

    Args:
        drafter: The attribute.
        rate: What to begin with.

    Attributes:
        drafter: Makes them.
        rate: The chance that the next token is the one foreseen.
        drafted: Tokens drafted so far.
        accepted: Of these, tokens that became output.
    """

    __slots__ = ("accepted", "drafted", "drafter", "rate")

    def __init__(self, drafter: RowDrafter, rate: float = 0.0) -> None:
        self.drafter = drafter
        self.rate = rate
        self.drafted = self.accepted = 0

    def learn(self) -> float:
        """The rate, once the tokens since the last call are known too."""
        self.rate = learned(self.rate, *self.drafter.follow())
        return self.rate
