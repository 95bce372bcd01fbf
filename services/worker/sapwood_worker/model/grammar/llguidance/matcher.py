"""One request's place in its grammar, over llguidance's matcher (an Earley parser with a lazily built lexer).

Jump-forward: where only one token may come next, :meth:`forced` returns it, and the scheduler appends it without asking the
model. The output is the same with and without. Where the grammar forces *text* that several token sequences spell, the model
chooses among them. A vocabulary with many long tokens leaves that choice nearly everywhere (Gemma's in JSON: always), so there
only special tokens are forced; over a vocabulary of bytes all forced text is. The end token after a complete answer is never
computed: the request ends as soon as nothing may follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import llguidance
import numpy as np
import numpy.typing as npt

from sapwood_common.grammar.compile import engine_message
from sapwood_worker.model.grammar.forced import Spellings, forced_by, only_token


class GrammarMatcher:
    """Implements :class:`~sapwood_worker.records.grammar_state.GrammarState`.

    Args:
        engine: A matcher of this request's own, at the start of the grammar.
        released: Called once with ``engine`` when the request has ended.
        spellings: What the tokens are spelled as.
        words: int32 words of a mask.
    """

    def __init__(
        self,
        engine: llguidance.LLMatcher,
        released: Callable[[llguidance.LLMatcher], None],
        spellings: Spellings,
        words: int,
    ) -> None:
        self._engine = engine
        self._released = released
        self._closed = False
        self._spellings = spellings
        self._words = words

    @property
    def engine(self) -> llguidance.LLMatcher:
        """The library's object, for calls over many matchers at once."""
        return self._engine

    @property
    def finished(self) -> bool:
        return bool(self._engine.is_stopped())

    @property
    def complete(self) -> bool:
        """Whether the output so far matches the grammar; more may be allowed."""
        return bool(self._engine.is_accepting())

    @property
    def error(self) -> str:
        return engine_message(self._engine.get_error()) if self._engine.is_error() else ""

    def accept(self, token_id: int) -> bool:
        """Takes O(bytes of the token) parser steps."""
        return bool(self._engine.consume_token(token_id))

    def accept_all(self, token_ids: Sequence[int]) -> int:
        """Advances over tokens of an earlier try; stops at the first that is not allowed; returns how many were."""
        return int(self._engine.try_consume_tokens(list(token_ids)))

    def validate(self, token_ids: Sequence[int]) -> int:
        """How many of the first tokens could be accepted one after another; does not change the state. For drafted tokens."""
        return int(self._engine.validate_tokens(list(token_ids)))

    def rollback(self, count: int) -> None:
        """Takes back the last ``count`` accepted tokens, end tokens included."""
        rolled = self._engine.rollback(count)
        assert rolled, f"cannot take {count} tokens back: {self.error}"

    def fill(self, mask: npt.NDArray[np.int32]) -> None:
        assert mask.flags.c_contiguous and mask.dtype == np.int32
        self._engine.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)

    def forced(self) -> int | None:
        """Takes 15 us, and computes a mask only where fewer than two tokens are a beginning of the forced bytes."""
        if not forced_by(self._engine.compute_ff_bytes(), self._spellings):
            return None
        mask = np.zeros(self._words, np.int32)
        self.fill(mask)
        return only_token(mask)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._released(self._engine)
