"""The drafts of one request: who makes them, and how often they were right."""

from __future__ import annotations

from typing import Protocol

_FAST, _SLOW = 0.15, 0.015
"""How much one token changes the fast rate, which follows a text whose nature changes, and the slow rate, for one that stays."""
_NEARER = 0.01
"""The share of the way to the other requests' rate that a rate moves in a step in which nothing was learned about it."""
_MEMORY = 0.99
"""The factor by which each token fades what is known about which of the two rates was better."""
_CLEARLY = -1.0
"""How much worse the slow rate must have been, in squared errors, for the fast one to be used: it may merely be lucky."""


def learned(rate: float, right: int, wrong: int, weight: float) -> float:
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
        drafted: Tokens drafted so far.
        accepted: How many of these became output.
        patience: Tokens after which it is tried again; grows with each trial in vain.
        tried_again: The number of tokens from which on it is.
    """

    __slots__ = ("_fast", "_known", "_slow", "_slower", "accepted", "drafted", "drafter", "patience", "tried_again")

    def __init__(self, drafter: RowDrafter, rate: float = 0.0) -> None:
        self.drafter = drafter
        self._fast = self._slow = rate
        self._slower = 0.0  # the squared errors of the fast rate beyond those of the slow one
        self._known = 0
        self.drafted = self.accepted = 0
        self.patience = self.tried_again = 0

    @property
    def rate(self) -> float:
        """The chance that the next token is the one foreseen."""
        return self._slow if self._slower > _CLEARLY else self._fast

    def learn(self, others: float | None = None) -> float:
        """Learns from the tokens since the last call and returns the rate; without any it moves towards ``others``."""
        right, wrong = self.drafter.follow()
        if others is not None and not right and not wrong:
            self._fast += _NEARER * (others - self._fast)
            self._slow += _NEARER * (others - self._slow)
        for outcome in (1.0,) * right + (0.0,) * wrong:
            fast, slow = outcome - self._fast, outcome - self._slow
            self._slower = _MEMORY * self._slower + fast * fast - slow * slow
            self._known += 1
            self._fast += _FAST * fast
            self._slow += max(_SLOW, 1 / (self._known + 1 / _FAST)) * slow
        return self.rate
