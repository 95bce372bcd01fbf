"""What makes drafts. A draft changes no token, only how many a step brings: the model chooses as ever, and what it would not
have chosen is thrown away."""

from __future__ import annotations

from typing import Protocol

from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.request_drafts import RowDrafter


class Drafter(Protocol):
    """Makes the drafts of all requests.

    Attributes:
        name: For people.
    """

    name: str

    def begin(self, request: Request) -> RowDrafter:
        """A request's own, for as long as the request lives."""
        ...
