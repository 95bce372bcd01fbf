"""The drafter interface. A draft changes no output token, only how many tokens a step yields: the model still chooses each
token, and wrong draft tokens are thrown away."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sapwood_worker.core.scheduler.request import Request, RowDrafter
from sapwood_worker.records.step import LateTokens


class Drafter(Protocol):
    """Makes the drafts of all requests.

    Attributes:
        name: For people and metrics.
        computes: Whether a draft takes time on the device. Then rows propose -1 for each token and :meth:`fill` computes it,
            rates are learned from drafted tokens only, and nothing is drafted after an unknown token.
        caught_up: How many earlier tokens of requests the last :meth:`fill` had to compute first.
        late: The tokens of the last :meth:`fill`, if only the device knows them yet; None: the returned drafts hold them.
    """

    name: str
    computes: bool
    caught_up: int
    late: LateTokens | None

    def begin(self, request: Request) -> RowDrafter:
        """Makes the drafter of one request, for as long as the request lives."""
        ...

    def behind(self, request: Request) -> int:
        """The most known tokens of a request that the drafter would have to compute before it drafts."""
        ...

    def fill(self, decodes: Sequence[Request], drafts: list[list[int]]) -> list[list[int]]:
        """The drafts with tokens in place of -1. Each draft is at most as long as proposed.

        Args:
            decodes: The requests. None of them has an unknown token if any of them has a draft.
            drafts: The wanted part of their proposals; there are pages for each of these tokens.
        """
        ...

    def settle(self) -> float:
        """Puts the late tokens into the drafts that :meth:`fill` has returned; returns how many seconds they took to make."""
        ...


class HostDrafter:
    """The base class of drafters that need no device: their rows propose the tokens themselves."""

    computes = False
    caught_up = 0
    late: LateTokens | None = None

    def behind(self, request: Request) -> int:
        """Nothing."""
        return 0

    def fill(self, decodes: Sequence[Request], drafts: list[list[int]]) -> list[list[int]]:
        """Returns the drafts unchanged: the rows have proposed them already."""
        return drafts

    def settle(self) -> float:
        """Nothing is late."""
        return 0.0
