"""Makes matchers from compiled grammars.

A grammar's lexer is an automaton that is built while tokens are masked, which is the costly part: a mask takes up to 20 ms when
cold and 50 us when warm. So the matcher of an ended request is reset and kept with its automaton, and the next request with the
same grammar gets a copy. Bound: the ``max_kept`` most recently used grammars are kept.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

import llguidance

from sapwood_common.errors import InvalidArgumentError
from sapwood_common.grammar.artefact import ArtefactError, GrammarArtefact
from sapwood_common.grammar.compile import engine_message, parser_limits
from sapwood_common.grammar.vocabulary import TokenVocabulary
from sapwood_worker.model.grammar.llguidance.matcher import GrammarMatcher


class GrammarStore:
    """Builds the index of the vocabulary, then matchers.

    The index of 262 144 tokens takes 1.3 s of CPU, all of it under the interpreter's lock, and 100 MB.

    Args:
        vocabulary: The model's tokens.
        vocab_size: Columns of the model's logits; ids beyond the vocabulary are never allowed.
        eos_token_ids: The model's end tokens, allowed where the grammar is complete.
        max_kept: The most grammars kept for later requests.

    Attributes:
        columns: Of a mask: those of the logits, and of the end that the library adds where the model has none.
    """

    def __init__(
        self, vocabulary: TokenVocabulary, vocab_size: int, eos_token_ids: Sequence[int], max_kept: int = 64
    ) -> None:
        tokens = [*vocabulary.tokens[:vocab_size], *(b"" for _ in range(vocab_size - len(vocabulary.tokens)))]
        self._tokenizer = _index(tokens, vocabulary.special_ids, eos_token_ids)
        self._spellings = frozenset(tokens)
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
        """A matcher for one request. Thread-safe; milliseconds, mostly without the interpreter's lock.

        Args:
            compiled: A serialised artefact.
            generated: Output tokens of an earlier try, from which the request goes on.

        Raises:
            InvalidArgumentError: The artefact is damaged or of another vocabulary, or the tokens do not match it.
        """
        try:
            artefact = GrammarArtefact.from_bytes(compiled)
        except ArtefactError as error:
            raise InvalidArgumentError(str(error), field="grammar.compiled") from error
        if artefact.fingerprint != self._fingerprint:
            raise InvalidArgumentError(
                "the grammar was compiled for another vocabulary than this model's", field="grammar.compiled"
            )
        released = partial(self._release, artefact.key)
        matcher = GrammarMatcher(self._copy(artefact), released, self._spellings, self._words)
        accepted = matcher.accept_all(generated)
        if accepted != len(generated):
            raise InvalidArgumentError(
                f"of the {len(generated)} tokens generated before, the grammar allows only the first {accepted}",
                field="output_tokens",
            )
        return matcher

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
    return llguidance.LLTokenizer(wrapper, eos_token=ends)
