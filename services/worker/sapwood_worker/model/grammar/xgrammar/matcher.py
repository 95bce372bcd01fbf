"""One request's place in its grammar, over xgrammar's matcher.

The library bounds no mask's work, so the time is looked at: a mask or a token that takes more CPU time than ``SLOW_SECONDS`` is
the last of its request, which ends with an error.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sapwood_worker.model.grammar.forced import Spellings, forced_by, only_token

SLOW_SECONDS = 1.0


class XgrammarState:
    """Implements :class:`~sapwood_worker.records.grammar_state.GrammarState`.

    Args:
        matcher: The library's, of this request's own, at the start of the grammar.
        end_token_ids: Those that may follow a complete text.
        spellings: What the tokens are spelled as.
        usable: A mask of the tokens that may ever come: the library also sets bits beyond the last.
    """

    def __init__(
        self, matcher: Any, end_token_ids: Sequence[int], spellings: Spellings, usable: npt.NDArray[np.int32]
    ) -> None:
        self._matcher = matcher
        self._ends = frozenset(end_token_ids)
        self._spellings = spellings
        self._usable = usable
        self._end_mask = mask_of(end_token_ids, len(usable))
        self._error = ""

    @property
    def finished(self) -> bool:
        if self._error or self._matcher.is_terminated():
            return True
        if not self._matcher.is_completed():
            return False
        mask = np.zeros_like(self._end_mask)
        self._fill(mask)
        return bool((mask == self._end_mask).all())

    @property
    def error(self) -> str:
        return self._error

    def accept(self, token_id: int) -> bool:
        if self._error:
            return False
        began = time.thread_time()
        if self._matcher.is_terminated() or not self._matcher.accept_token(token_id):
            self._error = f"the grammar does not allow token {token_id} here"
        self._look_at_time(began)
        return not self._error

    def accept_all(self, token_ids: Sequence[int]) -> int:
        """Advances over tokens of an earlier try; stops at the first that is not allowed; returns how many were."""
        for count, token in enumerate(token_ids):
            if self._matcher.is_terminated() or not self._matcher.accept_token(token):
                return count
        return len(token_ids)

    def validate(self, token_ids: Sequence[int]) -> int:
        if self._error:
            return 0
        accepted = self.accept_all(token_ids)
        if accepted:
            self._matcher.rollback(accepted)
        return accepted

    def rollback(self, count: int) -> None:
        """Takes back the last ``count`` accepted tokens, end tokens included."""
        if count:
            self._matcher.rollback(count)

    def fill(self, mask: npt.NDArray[np.int32]) -> None:
        if self._error or self._matcher.is_terminated():
            mask[:] = 0
            mask[: len(self._end_mask)] = self._end_mask
            return
        self._fill(mask)
        if not mask.any():
            self._error = "after some text nothing may follow"
            mask[: len(self._end_mask)] = self._end_mask

    def forced(self) -> int | None:
        if self._error or self._matcher.is_terminated():
            return None
        text = self._matcher.find_jump_forward_string().encode("utf-8", "surrogateescape")
        if not forced_by(text, self._spellings):
            return None
        mask = np.zeros_like(self._end_mask)
        self._fill(mask)
        token = only_token(mask)
        return None if token in self._ends else token

    def close(self) -> None:
        """The library frees it."""

    def _fill(self, mask: npt.NDArray[np.int32]) -> None:
        began = time.thread_time()
        words = mask[: len(self._end_mask)]
        self._matcher.fill_next_token_bitmask(words[None])
        words &= self._usable
        self._look_at_time(began)

    def _look_at_time(self, began: float) -> None:
        if time.thread_time() - began > SLOW_SECONDS:
            self._error = f"the grammar is too complex: a token took longer than {SLOW_SECONDS:.0f} s"


def mask_of(token_ids: Sequence[int], words: int) -> npt.NDArray[np.int32]:
    """A mask, int32 [words], that allows these tokens."""
    bits = np.zeros(words * 32, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
