"""Drafts without a model, because text often repeats earlier text.

A guess is a place in a source. The source is an earlier request in the prefix cache with the same beginning, or the request's
own tokens where its last tokens have occurred before. While the request's tokens match the source the place moves along, which
costs one comparison a token. At a mismatch the drafter searches near the place (a token may have been replaced, left out or
added), then in the cache, then in the n-grams.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable

import numpy as np

from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.speculation.drafter import HostDrafter

_BACK, _AHEAD = 8, 24
"""How many tokens before and after a mismatch are searched for the request's last two tokens."""
_ASK_AGAIN = 16
"""The cache is asked again after this many tokens: it has whole pages, so a few tokens rarely change its answer."""


class NgramDrafter(HostDrafter):
    """Implements :class:`~sapwood_worker.core.scheduler.speculation.drafter.Drafter`.

    Args:
        cached: Returns the tokens that the prefix cache has after a running request's known tokens.
    """

    name = "prefix"

    def __init__(self, cached: Callable[[Request], array[int]]) -> None:
        self._cached = cached

    def begin(self, request: Request) -> CopyingRow:
        return CopyingRow(request.token_ids, lambda: self._cached(request))


class CopyingRow:
    """Implements :class:`~sapwood_worker.core.scheduler.request.RowDrafter`.

    Args:
        tokens: The request's tokens; the list grows.
        cached: Returns the tokens that the cache has after them.
    """

    def __init__(self, tokens: array[int], cached: Callable[[], array[int]]) -> None:
        self._tokens = tokens
        self._cached = cached
        self._ngrams: NgramIndex | None = None
        self._followed = len(tokens)
        self._asked: int | None = None
        self._source: array[int] | None = None
        self._at = 0
        self._lost: tuple[array[int], int] | None = None

    def follow(self) -> tuple[int, int]:
        right = wrong = 0
        for token in self._tokens[self._followed :]:
            if self._source is None:
                continue
            if self._at == len(self._source):  # it had no more to say
                self._source = None
            elif self._source[self._at] == token:
                self._at += 1
                right += 1
            else:
                self._lost = self._source, self._at
                self._source = None
                wrong += 1
        self._followed = len(self._tokens)
        return right, wrong

    def propose(self, unknown: int, most: int) -> list[int]:
        if self._source is None:
            self._look()
        elif self._at == len(self._source):  # the cache may have more by now
            self._asked = None
            self._look()
        source, at, wanted = self._source, self._at, unknown + most
        if source is None:
            return []
        ahead = source[at : at + wanted].tolist()
        if source is self._tokens:
            period = len(source) - at
            while len(ahead) < wanted:  # it repeats itself, and may continue to do so
                ahead.append(ahead[-period])
        return ahead[unknown:]

    def _look(self) -> None:
        """Sets source and place, if any can be found."""
        tokens, self._source = self._tokens, None
        if self._lost is not None and self._look_near(*self._lost):
            self._lost = None
            return
        if self._asked is None or len(tokens) >= self._asked + _ASK_AGAIN:
            self._asked = len(tokens)
            if cached := self._cached():
                self._source, self._at, self._lost = cached, 0, None
                return
        if self._ngrams is None:
            self._ngrams = NgramIndex(tokens)
        place = self._ngrams.find()
        if place is not None:
            self._source, self._at, self._lost = tokens, place, None

    def _look_near(self, source: array[int], at: int) -> bool:
        """Finds the request's last two tokens in the source around a place."""
        last = self._tokens[-2:]
        start = max(0, at - _BACK)
        # A place counts only if tokens follow it; in the request itself, the end does not count.
        end = min(len(source) - (source is self._tokens), at + _AHEAD) - 2
        for place in range(start, end):
            if source[place] == last[0] and source[place + 1] == last[1]:
                self._source, self._at = source, place + 2
                return True
        return False


# Finds where in a sequence its last tokens have occurred before.
#
# Source of the idea: prompt lookup decoding (Saxena, 2023). Tokens that exist when the index is made are sorted once, O(n log n)
# in numpy; later tokens go into a dictionary, O(1) a token. A lookup is a binary search, and compares the tokens before the
# latest few places. The place with the longest match is the likeliest: where the demo model edits a
# listing, a step of 8 drafted tokens brings 4.1 tokens with the longest match of two or more, and 3.7 with the latest
# match of three (``benchmarks/draft_trees.py``).
LENGTH = 2
"""Tokens that must be equal."""
MOST_PLACES, _LONGEST = 8, 32
"""How many of the latest places are compared, and how many tokens before each."""
_SHIFT = 32


class NgramIndex:
    """Finds the earlier occurrence of the last tokens, at least ``LENGTH``, whose context is most like the end of the sequence.

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
        """The index of the token that followed an earlier occurrence of the last tokens; None: they did not occur. Among the
        latest occurrences of the last ``LENGTH`` tokens it takes the one with most equal tokens before it, and among equals the
        latest.
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
