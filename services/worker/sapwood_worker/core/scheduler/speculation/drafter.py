"""What makes drafts. A draft changes no token, only how many a step brings: the model chooses as ever, and what it would not
have chosen is thrown away."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sapwood_worker.core.scheduler.request import Request, RowDrafter
from sapwood_worker.records.step import LateTokens


class Drafter(Protocol):
    """Makes the drafts of all requests.

    Attributes:
        name: For people and metrics.
        computes: Whether a draft takes time on the device. Then rows propose -1 for each token, which :meth:`fill` computes,
            rates are learned of what is drafted alone, and nothing is drafted after a token that is not known yet.
        caught_up: Tokens of requests' past that the last :meth:`fill` had to compute first.
        late: The tokens of the last :meth:`fill`, if only the device knows them yet; None: its drafts hold them.
    """

    name: str
    computes: bool
    caught_up: int
    late: LateTokens | None

    def begin(self, request: Request) -> RowDrafter:
        """A request's own, for as long as the request lives."""
        ...

    def behind(self, request: Request) -> int:
        """How many of a request's known tokens it would have to compute before it drafts for it, at most."""
        ...

    def fill(self, decodes: Sequence[Request], drafts: list[list[int]]) -> list[list[int]]:
        """The drafts, each as long as proposed at most, with tokens in place of -1.

        Args:
            decodes: The requests, none of them with an unknown token where any is drafted for.
            drafts: What of their proposals is wanted; for each of these tokens there are pages.
        """
        ...

    def settle(self) -> float:
        """Puts the late tokens into the drafts that :meth:`fill` has returned; returns how many seconds they took to make."""
        ...


class HostDrafter:
    """The base of drafters that need no device: their rows propose the tokens themselves."""

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
