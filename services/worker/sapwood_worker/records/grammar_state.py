"""What the scheduler knows of a request's grammar."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

import numpy as np
import numpy.typing as npt


class GrammarState(Protocol):
    """The position of one request's output in its grammar. The state stays with the request while the request waits or is
    retracted."""

    @property
    def finished(self) -> bool:
        """Whether the request is over: no token may follow, or an end token has come."""
        ...

    @property
    def error(self) -> str:
        """Why the grammar has failed; empty if it has not. Once set it stays."""
        ...

    def accept(self, token_id: int) -> bool:
        """Advances by one token of output. False if the grammar does not allow it; then ``error`` is set. Mutates the state."""
        ...

    def fill(self, mask: npt.NDArray[np.int32]) -> None:
        """Writes which tokens may come next into ``mask``: int32 [W], bit ``i % 32`` of word ``i // 32`` for token ``i``.

        If the grammar is complete or ``error`` is set (this call may set it), only end tokens may come. May run in any thread,
        but not at the same time as another call on this state.
        """
        ...

    def forced(self) -> int | None:
        """The only token that may come next; None if several may, or only the end. Does not change the state."""
        ...

    def guess(self, most: int, token_ids: Sequence[int], start: int) -> list[int]:
        """A draft of at most ``most`` tokens that spell the text which must come next, as the model cut such text last or else as
        its tokenizer would; empty if no text is forced. Other tokens may spell it too, so the model has to choose.

        Args:
            most: The most tokens.
            token_ids: The request's tokens so far, from which later drafts learn.
            start: Where its output begins.
        """
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
            drafts: Draft tokens that each state would accept: the state gets a row after each of them too, and is then restored.
                Empty: none has any.

        Returns:
            int32 [rows, words], state after state, valid until the next ``start``.
        """
        ...
