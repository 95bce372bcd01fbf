"""What makes the states of requests with a grammar. A new backend is a function of the form ``MakeBackend`` and a line in
``registry.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sapwood_common.errors import InvalidArgumentError
from sapwood_common.grammar.artefact import ArtefactError, GrammarArtefact
from sapwood_common.grammar.vocabulary import TokenVocabulary
from sapwood_worker.records.grammar_state import GrammarState, MaskFiller


@dataclass(frozen=True, slots=True)
class GrammarNeeds:
    """What a backend is made from.

    Attributes:
        vocabulary: The model's tokens.
        vocab_size: Columns of the model's logits; ids beyond the vocabulary are never allowed.
        eos_token_ids: The model's end tokens, allowed where a grammar is complete.
        timeout: Most seconds that one grammar may take to build.
    """

    vocabulary: TokenVocabulary
    vocab_size: int
    eos_token_ids: Sequence[int]
    timeout: float


class GrammarBackend(Protocol):
    """Builds states for one vocabulary."""

    def build(self, compiled: bytes, generated: Sequence[int] = ()) -> GrammarState:
        """A state for one request; the call is bounded in time and memory, whatever the grammar. Thread-safe.

        Args:
            compiled: A serialised artefact.
            generated: Output tokens of an earlier try, from which the request goes on.

        Raises:
            InvalidArgumentError: The artefact is damaged or of another vocabulary, the tokens do not match it, or the backend
                cannot enforce the grammar; the message says which.
            DeadlineExceededError: The grammar took too long.
        """
        ...

    def masks(self) -> MaskFiller:
        """What fills the masks of a step."""
        ...

    def close(self) -> None:
        """Ends what the backend has started."""
        ...


MakeBackend = Callable[[GrammarNeeds], GrammarBackend]
"""Raises ``ConfigError`` where a library is missing."""


def read_artefact(compiled: bytes, fingerprint: bytes) -> GrammarArtefact:
    """The artefact of a request.

    Args:
        compiled: Its bytes.
        fingerprint: Names the model's vocabulary.

    Raises:
        InvalidArgumentError: It is damaged, or of another vocabulary.
    """
    try:
        artefact = GrammarArtefact.from_bytes(compiled)
    except ArtefactError as error:
        raise InvalidArgumentError(str(error), field="grammar.compiled") from error
    if artefact.fingerprint != fingerprint:
        raise InvalidArgumentError(
            "the grammar was compiled for another vocabulary than this model's", field="grammar.compiled"
        )
    return artefact


def go_on(accepted: int, generated: Sequence[int]) -> None:
    """Raises InvalidArgumentError unless a grammar has accepted all tokens of an earlier try."""
    if accepted != len(generated):
        raise InvalidArgumentError(
            f"of the {len(generated)} tokens generated before, the grammar allows only the first {accepted}",
            field="output_tokens",
        )
