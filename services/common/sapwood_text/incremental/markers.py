"""A set of fixed strings to look for in a text that arrives in pieces.

No marker may contain another one, so that a match is certain at once: the first marker that is complete is also the first that
began, and no longer one can follow from it. A search that continues from any cut finds the same markers as a search of the
whole text.
"""

from __future__ import annotations

import re
from functools import lru_cache


class Markers:
    """Looks for the first of several fixed strings.

    Args:
        literals: The strings, none empty, none part of another.
    """

    def __init__(self, *literals: str) -> None:
        assert literals and all(literals), "a marker is not empty"
        assert not any(a in b for a in literals for b in literals if a is not b), "no marker contains another"
        self.literals = literals
        self._pattern = re.compile("|".join(map(re.escape, literals)))
        self.find = self._pattern.search
        """Finds the first marker in a text, from a place on."""
        self.may_begin = re.compile("[" + "".join(re.escape(literal[0]) for literal in literals) + "]").search
        """Finds the first character of any marker in a text."""
        self._longest_prefix = max(map(len, literals)) - 1
        # The leftmost place from which the text up to its end is the beginning of a marker.
        self._beginning = re.compile("|".join(_beginning_of(literal) for literal in literals))

    def remove(self, text: str) -> str:
        """``text`` without the markers in it."""
        return self._pattern.sub("", text)

    def held(self, text: str, start: int) -> int:
        """How many characters at the end of ``text[start:]`` may be the beginning of a marker."""
        tail = len(text) - self._longest_prefix
        match = self._beginning.search(text, tail if tail > start else start)
        return len(text) - match.start() if match else 0


@lru_cache(maxsize=256)
def markers_of(*literals: str) -> Markers:
    """The markers with these literals, which streams share."""
    return Markers(*literals)


def _beginning_of(literal: str) -> str:
    """A pattern for the proper beginnings of ``literal`` at the end of a text."""
    if len(literal) == 1:
        return "(?!)"
    pattern = ""
    for char in reversed(literal[1:-1]):
        pattern = f"(?:{re.escape(char)}{pattern})?"
    return re.escape(literal[0]) + pattern + r"\Z"
