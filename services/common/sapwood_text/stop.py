"""Stop strings in streamed text: found across any cut of the text, and no part of one is ever shown.

Algorithm: Knuth, Morris and Pratt (1977), one automaton for each stop string, fed a character at a time. The state of each is the
length of the longest end of the text that begins its string, so the longest state of all is what is held back. The string
completed first ends the text, before its own first character; of several completed by the same character, the longest. So the
result does not depend on how the text is cut. Complexity: amortised O(characters x stop strings); while no string has begun, a
search in C for its first character. Memory: four bytes for each character of the stop strings, and the text held back, which is
shorter than the longest of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence


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
