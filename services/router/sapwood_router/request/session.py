"""A request that goes on with a session, as the stages see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class SessionTurn(Protocol):
    """One request of a session; there is one at a time.

    Attributes:
        tokens: What the session holds so far.
        worker: The address of the worker that has it cached; empty: none.
    """

    tokens: Sequence[int]
    worker: str

    def commit(
        self, token_ids: Sequence[int], prompt_tokens: int, cached_tokens: int, model: str, worker: str, cache_salt: str
    ) -> None:
        """The request has its whole answer.

        Args:
            token_ids: All that the session holds now.
            prompt_tokens, cached_tokens: How many of them were the prompt, and how many of these were cached.
            model: The model.
            worker: The address of the worker that finished it.
            cache_salt: The request's salt.
        """
        ...

    def release(self) -> None:
        """The request is over; without a commit the session is as it was before. May be called again."""
        ...
