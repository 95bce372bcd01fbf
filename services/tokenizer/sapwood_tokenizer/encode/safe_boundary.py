"""Where a text can be cut so that the tokens of the parts, put together, are the tokens of the whole.

The library takes added tokens (``<|im_end|>``) out of a text first; the text between two of them is then normalised, split into
words and encoded on its own. So the place after such a token is a safe boundary, if the token is found there whatever
surrounds it. That holds if

- it is matched in the raw text: it is not ``normalized``, or the tokenizer has no normalizer;
- it does not depend on its neighbours: it has neither ``lstrip``, ``rstrip`` nor ``single_word``;
- its neighbours do not depend on it: it neither begins nor ends with white space, which a neighbour with ``lstrip`` or ``rstrip``
  would take, nor with a letter or digit, which would keep a neighbour with ``single_word`` from being found;
- it cannot overlap another added token: it is part of none, none is part of it, and none begins with its end or ends with its
  beginning, itself included.

Only one thing still depends on the place: whether a part is the first of its text (Metaspace's ``prepend_scheme`` "first"). So
that belongs to a part's key, and later parts are encoded behind a boundary token whose id is dropped.

No place inside the text between two added tokens counts as safe. In a SentencePiece vocabulary merges may cross any of
them, and a byte-level one's pre-tokenizer looks ahead.

Complexity: finding the tokens is O(sum of squares of the added tokens' lengths), once; cutting is one pass of a regular
expression that is a trie, so its time does not depend on how many tokens there are.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from tokenizers import AddedToken, Tokenizer

SHORTEST_PART = 128
"""Fewest characters of a part: shorter ones are not worth looking up, so a text is cut at the first boundary after this many."""

_LONGEST_TOKEN = 256

_AT_AN_END = re.compile(r"\A[\s\w]|[\s\w]\Z")


class SafeBoundaries:
    """Cuts texts at safe boundaries, skipping some so that no part is too short.

    Attributes:
        lead: A boundary token's text; None if the tokenizer has none, and texts are never cut.

    Args:
        tokenizer: The tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokens = boundary_tokens(list(tokenizer.get_added_tokens_decoder().values()), normalizes=_normalizes(tokenizer))
        # Only tokens that begin with the commonest first character: a search for one character is many times as fast.
        firsts = Counter(token[0] for token in tokens)
        tokens = [token for token in tokens if token[0] == firsts.most_common(1)[0][0]]
        self.lead = tokens[0] if tokens else None
        self._pattern = re.compile(_trie_pattern(tokens)) if tokens else None

    def cut(self, text: str) -> list[str]:
        """The parts of a text, in order. All but the last end with a boundary token; the last may be empty."""
        if self._pattern is None or len(text) <= SHORTEST_PART:
            return [text]
        parts: list[str] = []
        start = 0
        for match in self._pattern.finditer(text):
            end = match.end()
            if end - start >= SHORTEST_PART:
                parts.append(text[start:end])
                start = end
        parts.append(text[start:])
        return parts


def boundary_tokens(added: Sequence[AddedToken], *, normalizes: bool) -> list[str]:
    """The added tokens after which it is safe to cut, sorted.

    Args:
        added: All added tokens.
        normalizes: Whether the tokenizer has a normalizer.
    """
    contents = {token.content for token in added if token.content}
    candidates = {
        token.content
        for token in added
        if not (token.normalized and normalizes)
        and not (token.lstrip or token.rstrip or token.single_word)
        and 0 < len(token.content) <= _LONGEST_TOKEN
        and not _AT_AN_END.search(token.content)
    }
    beginnings = {text[:length] for text in contents for length in range(1, len(text))}
    ends = {text[length:] for text in contents for length in range(1, len(text))}
    firsts = {text[0] for text in contents}
    within = {text: {part for part in _proper_parts(text, firsts) if part in contents} for text in contents}
    inner = set().union(*within.values())
    return sorted(
        text
        for text in candidates - inner
        if not within[text]
        and not any(text[:length] in ends or text[length:] in beginnings for length in range(1, len(text)))
    )


def _proper_parts(text: str, firsts: set[str]) -> Iterator[str]:
    """All parts but the whole that begin with one of ``firsts``."""
    for start, first in enumerate(text):
        if first not in firsts:
            continue
        for end in range(start + 1, len(text) + 1):
            if end - start < len(text):
                yield text[start:end]


def _normalizes(tokenizer: Tokenizer) -> bool:
    if tokenizer.normalizer is None:
        return False
    state = json.loads(tokenizer.normalizer.__getstate__())
    return bool(state["type"] != "Sequence" or state["normalizers"])


def _trie_pattern(tokens: Iterable[str]) -> str:
    """An expression that matches any of the tokens; no token is the beginning of another."""
    groups: dict[str, list[str]] = {}
    for token in tokens:
        groups.setdefault(token[0], []).append(token)
    branches = []
    for group in groups.values():
        first, last = min(group), max(group)
        common = first[
            : next((i for i, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]), len(first))
        ]
        rest = [token[len(common) :] for token in group]
        branches.append(re.escape(common) + (_trie_pattern(rest) if len(rest) > 1 else re.escape(rest[0])))
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
