"""Tokens that a grammar forces: where only one may come next, the scheduler appends it without asking the model."""

from __future__ import annotations

from collections.abc import Set

import numpy as np
import numpy.typing as npt

_LONGEST_BEGINNING = 16
"""Bytes of the longest token looked for at the beginning of forced text; a mask is then seldom computed in vain."""


def forced_by(text: bytes, spellings: Set[bytes]) -> bool:
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
