"""Makes matchers from compiled grammars.

A grammar's lexer is an automaton that is built while tokens are masked, which is the costly part: a mask takes up to 20 ms when
cold and 50 us when warm. So the matcher of an ended request is reset and kept with its automaton, and the next request with the
same grammar gets a copy. Bound: the ``max_kept`` most recently used grammars are kept.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

import llguidance
import numpy as np
import numpy.typing as npt

from sapwood_common.errors import InvalidArgumentError
from sapwood_common.grammar.artefact import GrammarArtefact
from sapwood_common.grammar.compile import engine_message, parser_limits
from sapwood_common.grammar.vocabulary import TokenVocabulary
from sapwood_worker.model.grammar.backend import (
    ForcedText,
    GrammarNeeds,
    Spellings,
    TokenMasks,
    forced_by,
    go_on,
    only_token,
    read_artefact,
)
from sapwood_worker.records.grammar_state import GrammarState

_SLICES = (r'[^"\\\x00-\x1F\x7F]{1,10}', r'[^"\\\x00-\x1F\x7F]+')
"""Sets of tokens. A set is allowed or forbidden as a whole wherever a grammar allows all text that matches: inside JSON
strings, and inside those of a limited length while at least ten characters are left. The library has two more by default, for
white space and for thirty characters. Without them the slowest mask is no slower, and each would be another index of nearly all
tokens."""


class GrammarStore:
    """Implements :class:`~sapwood_worker.model.grammar.backend.GrammarBackend`.

    Its index of 262 144 tokens takes 0.9 s of CPU, all of it under the interpreter's lock, and 67 MB.

    Args:
        vocabulary: The model's tokens.
        vocab_size: Columns of the model's logits; ids beyond the vocabulary are never allowed.
        eos_token_ids: The model's end tokens, allowed where the grammar is complete.
        max_kept: The most grammars kept for later requests.

    Attributes:
        columns: Width of a mask: that of the logits, and the end that the library adds where the model has none.
    """

    def __init__(
        self, vocabulary: TokenVocabulary, vocab_size: int, eos_token_ids: Sequence[int], max_kept: int = 64
    ) -> None:
        tokens = [*vocabulary.tokens[:vocab_size], *(b"" for _ in range(vocab_size - len(vocabulary.tokens)))]
        self._tokenizer = _index(tokens, vocabulary.special_ids, eos_token_ids)
        self._spellings = Spellings(
            [b"" if index in vocabulary.special_ids else token for index, token in enumerate(tokens)]
        )
        self.columns = int(self._tokenizer.vocab_size)
        self._words = -(-self.columns // 32)
        self._fingerprint = vocabulary.fingerprint
        self._max_kept = max_kept
        self._kept: OrderedDict[bytes, llguidance.LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def num_kept(self) -> int:
        """Grammars kept for later requests."""
        return len(self._kept)

    def build(self, compiled: bytes, generated: Sequence[int] = ()) -> GrammarMatcher:
        """Takes milliseconds, mostly without the interpreter's lock."""
        artefact = read_artefact(compiled, self._fingerprint)
        released = partial(self._release, artefact.key)
        matcher = GrammarMatcher(self._copy(artefact), released, self._spellings, self._words)
        go_on(matcher.accept_all(generated), generated)
        return matcher

    def masks(self, threads: int | None = None) -> TokenMasks:
        """Returns the object that fills the masks of a step, in parallel.

        Args:
            threads: Cores that fill rows; None lets the library choose.
        """
        executor = llguidance.LLExecutor(threads)

        def together(states: Sequence[tuple[GrammarState, int]], rows: npt.NDArray[np.int32]) -> None:
            engines = [(state.engine, place) for state, place in states if isinstance(state, GrammarMatcher)]
            executor.unsafe_compute_mask_ptr(engines, rows.ctypes.data, rows.shape[1] * 4, len(rows))
            for state, place in states:
                if not isinstance(state, GrammarMatcher):
                    state.fill(rows[place])

        return TokenMasks(self.columns, together)

    def close(self) -> None:
        """There is nothing to end."""

    def _copy(self, artefact: GrammarArtefact) -> llguidance.LLMatcher:
        with self._lock:
            kept = self._kept.get(artefact.key)
            if kept is not None:
                self._kept.move_to_end(artefact.key)
                return kept.deep_copy()
        engine = llguidance.LLMatcher(self._tokenizer, artefact.lark, log_level=0, limits=parser_limits())
        if engine.is_error():
            raise InvalidArgumentError(f"grammar: {engine_message(engine.get_error())}", field="grammar")
        with self._lock:
            self._keep(artefact.key, engine.deep_copy())
        return engine

    def _release(self, key: bytes, engine: llguidance.LLMatcher) -> None:
        if engine.is_error() or not engine.reset():
            return
        with self._lock:
            self._keep(key, engine)

    def _keep(self, key: bytes, engine: llguidance.LLMatcher) -> None:
        self._kept[key] = engine
        self._kept.move_to_end(key)
        while len(self._kept) > self._max_kept:
            self._kept.popitem(last=False)


class _Tokens:
    """What the library asks of a tokenizer. It never tokenizes: grammars are compiled with ``no_forcing``."""

    def __init__(self, tokens: list[bytes], special_ids: Sequence[int], eos_token_id: int | None) -> None:
        self.tokens = tokens
        self.special_token_ids = special_ids
        self.eos_token_id = eos_token_id
        self.bos_token_id = None

    def __call__(self, text: bytes) -> list[int]:
        return []


def _index(tokens: list[bytes], special_ids: frozenset[int], eos_token_ids: Sequence[int]) -> llguidance.LLTokenizer:
    special = sorted(index for index in special_ids | set(eos_token_ids) if index < len(tokens))
    ends = list(eos_token_ids) or None  # if the model has none, the library adds one beyond the vocabulary
    wrapper = llguidance.TokenizerWrapper(_Tokens(tokens, special, ends[0] if ends else None))
    return llguidance.LLTokenizer(wrapper, eos_token=ends, slices=list(_SLICES))


def make_llguidance(needs: GrammarNeeds) -> GrammarStore:
    """The backend; ``needs.timeout`` is not looked at, as the library's fuel bounds a build to some 20 ms."""
    return GrammarStore(needs.vocabulary, needs.vocab_size, needs.eos_token_ids)


# One request's place in its grammar, over llguidance's matcher (an Earley parser with a lazily built lexer).
#
# Jump-forward: where only one token may come next, :meth:`forced` returns it, and the scheduler appends it without
# asking the model. Where the grammar forces *text* that several token sequences spell, the model chooses among them:
# :meth:`guess` has the tokenizer's own, which the next step checks as a draft. The output is the same with and without.
# The end token after a complete answer is never computed: the request ends as soon as nothing may follow.
class GrammarMatcher:
    """Implements :class:`~sapwood_worker.records.grammar_state.GrammarState`.

    Args:
        engine: A matcher of this request's own, at the start of the grammar.
        released: Called once with ``engine`` when the request has ended.
        spellings: The spellings of the tokens.
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
        self._forced = ForcedText(spellings)
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

    def guess(self, most: int, token_ids: Sequence[int], start: int) -> list[int]:
        """Takes 15 us where nothing is drafted."""
        return self._forced.draft(self, most, token_ids, start)

    def forced_text(self) -> bytes:
        """As :class:`~sapwood_worker.model.grammar.backend.DraftEngine`."""
        return bytes(self._engine.compute_ff_bytes())

    def take(self, token_ids: list[int]) -> int:
        """As :class:`~sapwood_worker.model.grammar.backend.DraftEngine`."""
        return self.accept_all(token_ids[: self.validate(token_ids)])

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._released(self._engine)
