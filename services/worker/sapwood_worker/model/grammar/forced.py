"""Tokens that a grammar forces: where only one may come next, the scheduler appends it without asking the model."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

_LONGEST_BEGINNING = 16
"""Bytes of the longest token looked for at the beginning of forced text; a mask is then seldom computed in vain."""


class Spellings:
    """What tokens are spelled as, by hashes: 2 MB for 262 144 tokens, where a set takes 16 beside the bytes.

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
