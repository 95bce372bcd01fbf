"""The interface of grammar backends. A new backend is a function of the form ``MakeBackend`` and a line in
``registry.py``.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sapwood_common.errors import InvalidArgumentError
from sapwood_common.grammar.artefact import ArtefactError, GrammarArtefact
from sapwood_common.grammar.vocabulary import TokenVocabulary
from sapwood_worker.records.grammar_state import GrammarState, MaskFiller


@dataclass(frozen=True, slots=True)
class GrammarNeeds:
    """The inputs from which a backend is made.

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
        """Makes the state of one request; the call is bounded in time and memory for every grammar. Thread-safe.

        Args:
            compiled: A serialised artefact.
            generated: Output tokens of an earlier attempt, after which the request continues.

        Raises:
            InvalidArgumentError: The artefact is damaged or of another vocabulary, the tokens do not match it, or the backend
                cannot enforce the grammar; the message says which.
            DeadlineExceededError: The grammar took too long.
        """
        ...

    def masks(self) -> MaskFiller:
        """Returns the object that fills the masks of a step."""
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


# Tokens that a grammar forces: where only one may come next, the scheduler appends it without asking the model.


_LONGEST_BEGINNING = 16
"""Bytes of the longest token looked for at the beginning of forced text; a mask is then seldom computed in vain."""


class Spellings:
    """The spellings of tokens, as hashes: 2 MB for 262 144 tokens, where a set would take 16 MB besides the bytes.

    Another text is found in it once in some 2^46 questions, and then no token is forced where one could have been.

    Args:
        tokens: The bytes of every token; those that are longer than what is looked for are left out.
    """

    def __init__(self, tokens: Iterable[bytes]) -> None:
        self._hashes = array("q", sorted(hash(token) for token in tokens if len(token) <= _LONGEST_BEGINNING))

    def __contains__(self, text: bytes) -> bool:
        wanted = hash(text)
        place = bisect_left(self._hashes, wanted)
        return place < len(self._hashes) and self._hashes[place] == wanted


def forced_by(text: bytes, spellings: Spellings) -> bool:
    """Whether forced text is likely to have but one token as its beginning, so that a mask is worth computing."""
    beginnings = (text[:end] in spellings for end in range(1, min(len(text), _LONGEST_BEGINNING) + 1))
    return bool(text) and sum(beginnings) <= 1


def only_token(mask: npt.NDArray[np.int32]) -> int | None:
    """The only token that a mask allows; None if there are several, or none."""
    words = np.flatnonzero(mask)
    if len(words) != 1:
        return None
    word = int(mask[words[0]]) & 0xFFFFFFFF
    return int(words[0]) * 32 + word.bit_length() - 1 if word & (word - 1) == 0 else None


# The masks of a step, filled while the model computes.
#
# ``start`` hands the states to a thread and returns at once; the libraries fill rows without the interpreter's lock,
# and a backend may fill many in parallel. The result is ready by the time the logits are, unless a grammar is cold.


FillTogether = Callable[[Sequence[tuple[GrammarState, int]], npt.NDArray[np.int32]], None]
"""Fills the row at each state's index."""


class TokenMasks:
    """Implements :class:`~sapwood_worker.records.grammar_state.MaskFiller`; one step at a time.

    Args:
        columns: Width of a mask, as the grammar backend says.
        together: Fills the rows of several states at once; None: they are filled one after another.
    """

    def __init__(self, columns: int, together: FillTogether | None = None) -> None:
        self._words = -(-columns // 32)
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="token-masks")
        self._together = together
        self._buffer: npt.NDArray[np.int32] = np.zeros((0, 0), np.int32)

    def start(
        self, states: Sequence[GrammarState], drafts: Sequence[Sequence[int]] = ()
    ) -> Future[npt.NDArray[np.int32]]:
        rows = len(states) + sum(map(len, drafts))
        if len(self._buffer) < rows:
            self._buffer = np.zeros((max(rows, 2 * len(self._buffer)), self._words), np.int32)
        return self._threads.submit(self._fill, list(states), drafts or [()] * len(states), self._buffer[:rows])

    def _fill(
        self, states: list[GrammarState], drafts: Sequence[Sequence[int]], rows: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.int32]:
        batched: list[tuple[GrammarState, int]] = []
        place = 0
        for state, draft in zip(states, drafts, strict=True):
            if draft:
                _fill_drafted(state, draft, rows[place : place + 1 + len(draft)])
            elif self._together is not None and len(states) > 1:
                batched.append((state, place))
            else:
                state.fill(rows[place])
            place += 1 + len(draft)
        if self._together is not None and batched:
            self._together(batched, rows)
        return rows


def _fill_drafted(state: GrammarState, draft: Sequence[int], rows: npt.NDArray[np.int32]) -> None:
    """Fills a row before each token of a draft and one after it. A token after which the state fails ends it: what follows is
    forbidden, and the state fails again when that token comes as output."""
    taken = 0
    rows[1:] = 0
    state.fill(rows[0])
    for token in draft:
        if not state.accept(token):
            break
        taken += 1
        state.fill(rows[taken])
    state.rollback(taken)
