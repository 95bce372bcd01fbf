"""Where in a sequence its last few tokens have stood before.

Source of the idea: prompt lookup decoding (Saxena, 2023). What is there when the index is made is sorted once, O(n log n) in
numpy; what comes later goes into a dictionary, O(1) a token. A lookup is a binary search.
"""

from __future__ import annotations

from array import array

import numpy as np

LENGTH = 3
"""Tokens that must be equal."""
_SHIFT = 21
_MASK = (1 << 64) - 1


class NgramIndex:
    """Finds the latest earlier place of the last ``LENGTH`` tokens. Two n-grams may share a key: a place is a guess.

    Args:
        tokens: Native uint32; may grow, and is read again then.
    """

    def __init__(self, tokens: array[int]) -> None:
        self._tokens = tokens
        ids = np.array(tokens, np.uint64)
        # The last n-gram is left out: nothing follows it yet.
        keys = ids[: max(0, len(ids) - LENGTH)]
        for place in range(1, LENGTH):
            keys = (keys << np.uint64(_SHIFT)) ^ ids[place : len(ids) - LENGTH + place]
        order = keys.argsort(kind="stable")
        self._keys, self._places = keys[order], order + LENGTH
        self._later: dict[int, int] = {}
        self._end = max(LENGTH, len(tokens))

    def find(self) -> int | None:
        """The index of the token that followed the last ``LENGTH`` tokens when they stood there before; None: never."""
        count = len(self._tokens)
        while self._end < count:
            self._later[self._key(self._end)] = self._end
            self._end += 1
        if count < LENGTH:
            return None
        key = self._key(count)
        if (place := self._later.get(key)) is not None:
            return place
        at = int(self._keys.searchsorted(np.uint64(key), side="right")) - 1
        return int(self._places[at]) if at >= 0 and int(self._keys[at]) == key else None

    def _key(self, end: int) -> int:
        key = 0
        for token in self._tokens[end - LENGTH : end]:
            key = (key << _SHIFT) ^ token
        return key & _MASK
