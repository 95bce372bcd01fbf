"""Where in a sequence its last tokens have stood before.

Source of the idea: prompt lookup decoding (Saxena, 2023). What is there when the index is made is sorted once, O(n log n) in
numpy; what comes later goes into a dictionary, O(1) a token. A lookup is a binary search, and compares what stood before the
latest few places. The place with the longest match is the likeliest: where the demo model edits a listing, a step of 8 drafted
tokens brings 4.1 tokens with the longest match of two or more, and 3.7 with the latest match of three
(``benchmarks/draft_trees.py``).
"""

from __future__ import annotations

from array import array
from bisect import bisect_right

import numpy as np

LENGTH = 2
"""Tokens that must be equal."""
MOST_PLACES, _LONGEST = 8, 32
"""The latest places that are compared, and the tokens before each that are."""
_SHIFT = 32


class NgramIndex:
    """Finds the earlier place of the last tokens, at least ``LENGTH``, that is most like the end of the sequence.

    Args:
        tokens: Native uint32; may grow, and is read again then.
    """

    def __init__(self, tokens: array[int]) -> None:
        self._tokens = tokens
        ids = np.array(tokens, np.uint64)
        # The last pair is left out: nothing follows it yet.
        count = max(0, len(ids) - LENGTH)
        keys = (ids[:count] << np.uint64(_SHIFT)) | ids[1 : count + 1]
        order = keys.argsort(kind="stable")
        self._keys = array("Q", keys[order].tobytes())  # a search in it takes half as long as numpy's
        self._places = order + LENGTH
        self._later: dict[int, list[int]] = {}
        self._end = max(LENGTH, len(tokens))

    def find(self) -> int | None:
        """Where the last tokens stood before: the index of the token that followed there; None: nowhere.

        Of the latest places after the same last ``LENGTH`` tokens it takes the one with most equal tokens before it, and of these
        the latest.
        """
        tokens, count = self._tokens, len(self._tokens)
        while self._end < count:
            self._later.setdefault(self._key(self._end), []).append(self._end)
            self._end += 1
        if count < LENGTH:
            return None
        key = self._key(count)
        places = self._later.get(key, [])[: -MOST_PLACES - 1 : -1]
        at = bisect_right(self._keys, key) - 1
        while at >= 0 and len(places) < MOST_PLACES and self._keys[at] == key:
            places.append(int(self._places[at]))
            at -= 1
        if len(places) < 2:
            return places[0] if places else None
        best, longest = places[0], -1
        for place in places:
            equal, most = LENGTH, min(place, _LONGEST)
            while equal < most and tokens[place - 1 - equal] == tokens[count - 1 - equal]:
                equal += 1
            if equal > longest:
                best, longest = place, equal
        return best

    def _key(self, end: int) -> int:
        return self._tokens[end - 2] << _SHIFT | self._tokens[end - 1]
