"""The interface of grammar backends. A new backend is a function of the form ``MakeBackend`` and a line in
``registry.py``.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, takewhile
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sapwood_common.errors import InvalidArgumentError
from sapwood_common.grammar.artefact import ArtefactError, GrammarArtefact
from sapwood_common.grammar.vocabulary import TokenVocabulary
from sapwood_worker.model.grammar.json_layout import JsonLayout, Place, Sequences
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


# Text that a grammar forces. Where only one token may come next, the scheduler appends it without asking the model. Where
# several token sequences spell the text, the tokenizer's own is the draft of the next step, and the model chooses.


_LONGEST_BEGINNING = 16
"""Bytes of the longest token looked for at the beginning of forced text; a mask is then seldom computed in vain."""
_LONGEST_TOKEN = 32
"""Bytes of the longest token that a guess may have."""
_LONGEST_GUESS = 64
"""Bytes of forced text that are cut into tokens at a time, in about 0.1 ms."""
_MOST_GUESSES = 4096


class DraftEngine(Protocol):
    """A grammar's place, to try tokens on."""

    @property
    def finished(self) -> bool:
        """Whether nothing may follow."""
        ...

    def forced_text(self) -> bytes:
        """What must come next; empty if several texts may."""
        ...

    def take(self, token_ids: list[int]) -> int:
        """Accepts the first tokens that are allowed; returns how many."""
        ...

    def rollback(self, count: int) -> None:
        """Takes back the last ``count`` tokens."""
        ...


class Spellings:
    """The spellings of tokens, as hashes with their ids: 3 MB for 262 144 tokens, where a dictionary would take 30 MB.

    Another text is found in it once in some 2^46 questions. Then no token is forced where one could have been, or a draft has a
    wrong token.

    Args:
        tokens: The bytes of every token, none for those that stand for no text. Longer ones than are looked for are left out.

    Attributes:
        tokens: The argument.
        usual_layout: The white space that requests wrote last.
    """

    def __init__(self, tokens: list[bytes]) -> None:
        # SentencePiece has a token for each byte beside those of its characters; a character's own token is meant.
        run = _byte_run(tokens)
        known = {hash(tokens[token]): token for token in run}
        known |= {
            hash(text): token
            for token, text in enumerate(tokens)
            if 0 < len(text) <= _LONGEST_TOKEN and token not in run
        }
        hashes = np.fromiter(known, np.int64, len(known))
        order = hashes.argsort()
        self._hashes = array("q", hashes[order].tobytes())
        self._ids = array("i", np.fromiter(known.values(), np.int32, len(known))[order].tobytes())
        self._lengths = array("H", (min(len(text), 0xFFFF) for text in tokens))
        self._cut = lru_cache(_MOST_GUESSES)(self._cut_by_merges)
        self._chosen: OrderedDict[bytes, int] = OrderedDict()
        self.tokens = tokens
        self.usual_layout: Sequences = {}

    def find(self, text: bytes) -> int | None:
        """The token with this spelling."""
        wanted = hash(text)
        place = bisect_left(self._hashes, wanted)
        return self._ids[place] if place < len(self._hashes) and self._hashes[place] == wanted else None

    def cut(self, text: bytes) -> tuple[int, ...]:
        """The tokens of a text's first bytes as byte pair encoding has them; fewer where a byte has no token."""
        return self._cut(text[:_LONGEST_GUESS])

    def chosen(self, text: bytes) -> int | None:
        """The token that the model chose last where this text had to come; None: another text came there, or none."""
        token = self._chosen.get(text[:_KNOWN_BY]) if text else None
        if token is None:
            return None
        spelt = self.tokens[token]
        return token if spelt and (text.startswith(spelt) or spelt.startswith(text)) else None

    def learn(self, text: bytes, token: int) -> None:
        """Notes which token the model chose where this text had to come; the latest places are kept."""
        if token >= len(self.tokens):
            return
        key = text[:_KNOWN_BY]
        self._chosen[key] = token
        self._chosen.move_to_end(key)
        if len(self._chosen) > _MOST_GUESSES:
            self._chosen.popitem(last=False)

    def length(self, token_ids: Iterable[int]) -> int:
        """The bytes that tokens spell."""
        return sum(self._lengths[token] for token in token_ids)

    def _cut_by_merges(self, text: bytes) -> tuple[int, ...]:
        """Byte pair encoding (Sennrich et al., 2016) without a split into words; the pair that is the token with the lowest id is
        merged first. So it is what the tokenizer does where ids are in the order of merges, as they nearly always are. O(n^2)."""
        parts = [text[place : place + 1] for place in range(len(text))]
        pairs = [self._rank(one + other) for one, other in pairwise(parts)]
        while pairs and (best := min(pairs)) != _NO_TOKEN:
            place = pairs.index(best)
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
            del pairs[place]
            if place:
                pairs[place - 1] = self._rank(parts[place - 1] + parts[place])
            if place < len(pairs):
                pairs[place] = self._rank(parts[place] + parts[place + 1])
        ids = [self.find(part) for part in parts]
        return tuple(takewhile(lambda token: token is not None, ids))  # type: ignore[arg-type]

    def _rank(self, text: bytes) -> int:
        token = self.find(text)
        return _NO_TOKEN if token is None else token


_NO_TOKEN = 1 << 31


_KNOWN_BY = 4
"""Bytes of forced text that say which token the model chose there last."""


class ForcedText:
    """Drafts what one request's grammar forces, and learns how the model spells it.

    A draft goes on where the grammar leaves white space free, with what the model wrote in such a place last, if forced text
    follows (``json_layout.py``).

    Args:
        spellings: The model's.
    """

    def __init__(self, spellings: Spellings) -> None:
        self._spellings = spellings
        self._layout = JsonLayout(spellings.tokens, spellings.usual_layout)
        self._read: int | None = None
        self._draft: list[tuple[int, bytes]] = []
        """The latest draft: its tokens, and the forced text that each began with; empty: none was forced there."""

    def draft(self, engine: DraftEngine, most: int, token_ids: Sequence[int], start: int) -> list[int]:
        """As :meth:`~sapwood_worker.records.grammar_state.GrammarState.guess`.

        Args:
            engine: The grammar after the output; it is the same again afterwards.
            most, token_ids, start: As there.
        """
        self._follow(token_ids, start)
        place = self._layout.place
        self._draft = []
        taken = 0
        while len(self._draft) < most:
            text = engine.forced_text()
            parts = self._spell(text) if text else self._lay_out(engine, place)
            if not parts:
                break
            parts = parts[: most - len(self._draft)]
            accepted = engine.take([token for token, _ in parts])
            taken += accepted
            for token, _ in parts[:accepted]:
                place = self._layout.after(place, token)
            self._draft += parts[:accepted]
            if accepted < len(parts) or engine.finished:
                break
        if taken:
            engine.rollback(taken)
        return [token for token, _ in self._draft]

    def _spell(self, text: bytes) -> list[tuple[int, bytes]]:
        """The tokens of forced text, each with the text that it begins: as the model cut it last, or as its tokenizer would."""
        parts: list[tuple[int, bytes]] = []
        text = text[:_LONGEST_GUESS]
        while text:
            learned = self._spellings.chosen(text)
            for token in self._spellings.cut(text) if learned is None else (learned,):
                parts.append((token, text))
                text = text[self._spellings.length((token,)) :]
                if learned is None and self._spellings.chosen(text) is not None:
                    break
            else:
                if learned is None:
                    break
        return parts

    def _lay_out(self, engine: DraftEngine, place: Place) -> list[tuple[int, bytes]]:
        """White space after which the grammar forces a text."""
        for guess in self._layout.guesses(place):
            accepted = engine.take(list(guess))
            forces = accepted == len(guess) and not engine.finished and bool(engine.forced_text())
            if accepted:
                engine.rollback(accepted)
            if forces:
                return [(token, b"") for token in guess]
        return []

    def _follow(self, token_ids: Sequence[int], start: int) -> None:
        """Reads the output since the last draft, and learns from what it was instead."""
        read = start if self._read is None else self._read
        drafted = iter(self._draft)
        right = True
        for place in range(read, len(token_ids)):
            token = token_ids[place]
            guess, text = next(drafted, (-1, b""))
            if right and text:
                self._spellings.learn(text, token)
            right = right and token == guess
            self._layout.read(token)
        self._read, self._draft = len(token_ids), []


def _byte_run(tokens: Sequence[bytes]) -> range:
    """The ids of 256 tokens that are the bytes in order; empty if there are none."""
    for start, text in enumerate(tokens[: max(0, len(tokens) - 255)]):
        if text == b"\0" and tokens[start + 255] == b"\xff":
            return range(start, start + 256)
    return range(0)


def forced_by(text: bytes, spellings: Spellings) -> bool:
    """Whether forced text is likely to have but one token as its beginning, so that a mask is worth computing."""
    beginnings = (spellings.find(text[:end]) is not None for end in range(1, min(len(text), _LONGEST_BEGINNING) + 1))
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
