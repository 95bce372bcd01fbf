"""One token stream on its way to text: whole characters only, special tokens skipped, stop strings honoured.

Algorithm: tokens become bytes (``vocabulary``), bytes become characters as soon as they are whole (UTF-8 is self-delimiting:
at most three bytes wait), characters are released as soon as they cannot belong to a stop string. O(1) for each token.
"""

from __future__ import annotations

import codecs
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from sapwood_text.vocabulary import TokenTable


class StopMatcher:
    """Watches one text.

    Args:
        stop: Stop strings, none empty.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._patterns = [_Pattern(text) for text in stop]
        self._held = ""

    def push(self, text: str, *, may_end: bool = True) -> tuple[str, str | None]:
        """Takes new text; returns what may be shown now, and the stop string that was completed, which ends the text.

        Where it may not end, a stop string that is completed is text; one that is begun may be completed by later text.
        """
        if not self._patterns:
            return text, None
        before = len(self._held)
        ends = [
            (end, -len(pattern.text), pattern.text)
            for pattern in self._patterns
            if (end := pattern.feed(text, may_end=may_end))
        ]
        text = self._held + text
        if ends:
            end, _, match = min(ends)
            self._held = ""
            return text[: before + end - len(match)], match
        keep = len(text) - max(pattern.state for pattern in self._patterns)
        self._held = text[keep:]
        return text[:keep], None

    def finish(self) -> str:
        """Ends the text; returns what was held back."""
        held, self._held = self._held, ""
        return held


class _Pattern:
    """One stop string. ``state`` is how many of its first characters the text fed so far ends with."""

    __slots__ = ("_fallback", "_matched", "state", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.state = 0
        # Entry i: after i + 1 matching characters, how many still match when the next does not; made as far as text has matched.
        self._fallback = array("I", [0])
        self._matched = 0

    def feed(self, text: str, *, may_end: bool) -> int:
        """How many characters of ``text`` it took to complete the string; 0 if it is not complete, or may not end the text."""
        pattern, state, at = self.text, self.state, 0
        while at < len(text):
            if not state:
                at = text.find(pattern[0], at)
                if at < 0:
                    break
            character = text[at]
            while state and character != pattern[state]:
                state = self._after(state)
            state += character == pattern[state]
            at += 1
            if state == len(pattern):
                if may_end:
                    return at
                state = self._after(state)
        self.state = state
        return 0

    def _after(self, state: int) -> int:
        """How many of ``state`` matching characters still match when the next one does not."""
        text, fallback, matched = self.text, self._fallback, self._matched
        for index in range(len(fallback), state):
            while matched and text[index] != text[matched]:
                matched = fallback[matched - 1]
            matched += text[index] == text[matched]
            fallback.append(matched)
        self._matched = matched
        return fallback[state - 1]


@dataclass(slots=True)
class Piece:
    """Text that became certain.

    Attributes:
        text: New text.
        tokens: How many tokens of the stream are part of the text so far.
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
        include_stop: Whether the stop string that ends the text is part of it.
        min_tokens: A stop string that is complete within this many tokens does not end the text.
    """

    def __init__(
        self,
        table: TokenTable,
        stop: Sequence[str],
        skipped: frozenset[int],
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._min_tokens = min_tokens
        self._table = table
        self._include_stop = include_stop
        self._skipped = skipped
        self._matcher = StopMatcher(stop) if stop else None
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = table.strips_leading_space
        self._incomplete = False  # bytes of a character wait for the rest of it
        self._tokens = 0
        self._consumed = 0
        # With stop strings, tokens count only once their characters are released. Each entry is a number of characters, and the
        # number of tokens that count once these characters are released. Tokens that wait for the same character share an entry.
        self._boundaries: deque[tuple[int, int]] = deque()
        self._decoded = 0
        self._released = 0

    def push(self, token_ids: Sequence[int]) -> Piece:
        """Takes new tokens; returns the text that became certain, possibly none."""
        if self._matcher is not None:
            return self._push_matched(token_ids, self._matcher)
        text = ""
        for token_id in token_ids:
            new = self._decode(token_id)
            text += new
            self._tokens += 1
            if not self._incomplete:
                self._consumed = self._tokens
            elif new:  # all that waited came out: what waits now are this token's last bytes
                self._consumed = self._tokens - 1
        return Piece(text, self._consumed)

    def _push_matched(self, token_ids: Sequence[int], matcher: StopMatcher) -> Piece:
        texts: list[str] = []
        for token_id in token_ids:
            text = self._decode(token_id)
            self._tokens += 1
            if text:
                self._decoded += len(text)
                released, match = matcher.push(text, may_end=self._tokens > self._min_tokens)
                texts.append(released)
                self._released += len(released)
                if match is not None:
                    # The tokens up to this one were needed to see the match; later ones are not part of the text.
                    return self._ended("".join(texts), match)
            self._account()
        return Piece("".join(texts), self._consumed)

    def finish(self) -> Piece:
        """Ends the stream: releases what was held back; half a character becomes U+FFFD."""
        rest = self._decoder.decode(b"", final=True)
        if self._matcher is None:
            return Piece(rest, self._tokens)
        released, match = self._matcher.push(rest, may_end=self._tokens > self._min_tokens)
        if match is not None:
            return self._ended(released, match)
        return Piece(released + self._matcher.finish(), self._tokens)

    def _ended(self, text: str, match: str) -> Piece:
        return Piece(text + match if self._include_stop else text, self._tokens, match)

    def _decode(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        if not self._incomplete and not self._at_start:
            text = self._table.text(token_id)
            if text is not None:
                return text
        raw = self._table.of(token_id)
        if self._at_start and raw:
            self._at_start = False
            raw = raw.removeprefix(b" ")
        text = self._decoder.decode(raw)
        self._incomplete = bool(self._decoder.getstate()[0])
        return text

    def _account(self) -> None:
        """Counts the last token, at once or when its characters are released."""
        boundary = self._decoded + self._incomplete
        waiting = self._boundaries
        if boundary <= self._released:
            waiting.clear()
            self._consumed = self._tokens
            return
        if waiting and waiting[-1][0] == boundary:
            waiting.pop()
        waiting.append((boundary, self._tokens))
        while waiting[0][0] <= self._released:
            self._consumed = waiting.popleft()[1]
