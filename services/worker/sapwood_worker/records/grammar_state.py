"""What the scheduler knows of a request's grammar."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

import numpy as np
import numpy.typing as npt


class GrammarState(Protocol):
    """Where one request's output stands in its grammar. It stays with the request while that waits or is retracted."""

    @property
    def finished(self) -> bool:
        """Whether nothing may follow, or an end token has come: the request is over."""
        ...

    @property
    def error(self) -> str:
        """Why the grammar cannot go on; empty while it can. Once set it stays."""
        ...

    def accept(self, token_id: int) -> bool:
        """Advances by one token of output. False if the grammar does not allow it; then ``error`` is set. Mutates the state."""
        ...

    def fill(self, mask: npt.NDArray[np.int32]) -> None:
        """Writes which tokens may come next into ``mask``: int32 [W], bit ``i % 32`` of word ``i // 32`` for token ``i``.

        Where the grammar is complete or ``error`` is set (this call may set it), only end tokens are. May run in any thread,
        but not beside another call on this state.
        """
        ...

    def forced(self) -> int | None:
        """The only token that may come next; None if several may, or only the end. Does not change the state."""
        ...

    def validate(self, token_ids: Sequence[int]) -> int:
        """How many of the first tokens could be accepted one after another; does not change the state."""
        ...

    def rollback(self, count: int) -> None:
        """Takes back the last ``count`` accepted tokens."""
        ...

    def close(self) -> None:
        """Frees the state, which is not used afterwards."""
        ...


class MaskFiller(Protocol):
    """Fills the masks of a step."""

    def start(
        self, states: Sequence[GrammarState], drafts: Sequence[Sequence[int]] = ()
    ) -> Future[npt.NDArray[np.int32]]:
        """Begins to fill one row for each state; the states must not be touched until the result is there.

        Args:
            states: The states.
            drafts: Tokens that each state would accept: it gets a row after each of them too, and is then as before.
                Empty: none has any.

        Returns:
            int32 [rows, words], state after state, valid until the next ``start``.
        """
        ...
