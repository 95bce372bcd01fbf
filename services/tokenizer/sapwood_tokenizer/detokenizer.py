"""One token stream on its way to text: whole characters only, special tokens skipped, stop strings honoured.

Algorithm: tokens become bytes (``token_bytes``), bytes become characters as soon as they are whole (UTF-8 is self-delimiting:
at most three bytes wait), characters are released as soon as they cannot belong to a stop string. O(1) a token.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from sapwood_tokenizer.stop import StopMatcher
from sapwood_tokenizer.token_bytes import TokenBytes


@dataclass(frozen=True, slots=True)
class Piece:
    """What became certain.

    Attributes:
        text: New text.
        tokens: How many tokens of the stream all text so far accounts for.
        stop_match: The stop string that ended the text.
    """

    text: str
    tokens: int
    stop_match: str | None = None


class Detokenizer:
    """Decodes one stream. Nothing may be pushed after a piece with a ``stop_match`` or after :meth:`finish`.

    Args:
        table: Bytes of each token.
        stop: Stop strings, none empty.
        skipped: Token ids that leave no text.
    """

    def __init__(self, table: TokenBytes, stop: Sequence[str], skipped: frozenset[int]) -> None:
        self._table = table
        self._skipped = skipped
        self._matcher = StopMatcher(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = table.strips_leading_space
        # For the tokens not yet accounted for: how many characters must be out until they are, and how many tokens of the
        # stream they and those before them are. One entry for all tokens that wait for the same character.
        self._boundaries: deque[tuple[int, int]] = deque()
        self._tokens = 0
        self._decoded = 0
        self._released = 0
        self._consumed = 0

    def push(self, token_ids: Sequence[int]) -> Piece:
        """Takes new tokens; returns the text that became certain, possibly none."""
        texts: list[str] = []
        for token_id in token_ids:
            text = self._decode(token_id)
            self._decoded += len(text)
            incomplete = bool(self._decoder.getstate()[0])
            boundary = self._decoded + incomplete
            self._tokens += 1
            if self._boundaries and self._boundaries[-1][0] == boundary:
                self._boundaries.pop()
            self._boundaries.append((boundary, self._tokens))
            released, match = self._matcher.push(text) if text else ("", None)
            texts.append(released)
            self._released += len(released)
            if match is not None:
                # The tokens up to this one were needed to see the match; what follows is not the text's any more.
                return Piece("".join(texts), self._tokens, match)
        return Piece("".join(texts), self._account())

    def finish(self) -> Piece:
        """No more tokens come: releases what was held back; half a character becomes U+FFFD."""
        rest = self._decoder.decode(b"", final=True)
        released, match = self._matcher.push(rest)
        if match is not None:
            return Piece(released, self._tokens, match)
        return Piece(released + self._matcher.finish(), self._tokens)

    def _decode(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        raw = self._table.of(token_id)
        if self._at_start and raw:
            self._at_start = False
            raw = raw.removeprefix(b" ")
        return self._decoder.decode(raw)

    def _account(self) -> int:
        while self._boundaries and self._boundaries[0][0] <= self._released:
            self._consumed = self._boundaries.popleft()[1]
        return self._consumed
