"""Everything that a request can ask for, and all that it was answered."""

from __future__ import annotations

from typing import Any

import numpy as np

from sapwood_common.grammar.artefact import GrammarArtefact
from sapwood_common.grammar.compile import GrammarBuilder
from sapwood_common.grammar.source import GrammarSource
from sapwood_common.grammar.vocabulary import TokenVocabulary
from sapwood_worker.model.grammar.llguidance import GrammarStore
from sapwood_worker.records.output import RequestOutput, TokenLogprobs

VOCAB = 97
ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"top_p": 0.9, "top_k": 40},
    {"presence_penalty": 0.8, "repetition_penalty": 1.3, "logprobs": 2},
    {"frequency_penalty": 0.5, "prompt_logprobs": 1, "logit_bias": {7: 3.0}},
    {"allowed_token_ids": tuple(range(3, 40)), "bad_words_ids": ((7, 8), (9,)), "min_tokens": 9},
    {"grammar": "[a-f]{3,9}x[0-9]{2,20}"},
    {"grammar": "[a-f]{3,9}x[0-9]{2,20}", "temperature": 0.0, "logprobs": 1},
]


def build_grammar(regex: str) -> Any:
    """The state of a grammar over VOCAB letters."""
    vocabulary = TokenVocabulary(tuple(bytes([32 + token]) for token in range(VOCAB)), frozenset())
    source = GrammarSource("regex", regex)
    lark = GrammarBuilder(vocabulary.special_names).compile(source)
    artefact = GrammarArtefact.of(source, vocabulary.fingerprint, lark)
    return GrammarStore(vocabulary, VOCAB, (2,)).build(artefact.to_bytes())


class Answer:
    """All that a request was answered."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.embedding = b""

    def take(self, output: RequestOutput) -> None:
        """Adds what a step brought."""
        self.tokens += output.token_ids
        self.logprobs += output.logprobs
        self.prompt_logprobs += output.prompt_logprobs
        self.embedding += output.embedding

    def assert_is(self, other: Answer) -> None:
        """Compares it with another: numbers may be rounded otherwise."""
        assert self.tokens == other.tokens
        for mine, theirs in ((self.logprobs, other.logprobs), (self.prompt_logprobs, other.prompt_logprobs)):
            assert [each.top_ids for each in mine] == [each.top_ids for each in theirs]
            assert np.allclose([each.logprob for each in mine], [each.logprob for each in theirs], atol=1e-4)
        ours, expected = (np.frombuffer(each.embedding, np.float32) for each in (self, other))
        assert np.allclose(ours, expected, rtol=1e-3, atol=1e-4)
