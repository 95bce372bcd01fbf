"""What a tokenizer does to a text before it looks for tokens, and what that says of time and of the number of tokens.

``tokenizer.json`` is a stranger's: a sequence of replacements that double a text, or an expression that explodes, takes minutes
for four characters. ``is_bounded`` knows the steps whose time is about linear; texts of other tokenizers are encoded in processes
that can be ended. ``least_tokens`` knows when a text has more than this many tokens without encoding it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, models

_LINEAR_NORMALIZERS = frozenset(
    {
        "NFC",
        "NFD",
        "NFKC",
        "NFKD",
        "Lowercase",
        "Strip",
        "StripAccents",
        "Nmt",
        "Precompiled",
        "BertNormalizer",
        "Prepend",
    }
    | {"ByteLevel"}
)
_LINEAR_PRE_TOKENIZERS = frozenset(
    {
        "ByteLevel",
        "Metaspace",
        "Whitespace",
        "WhitespaceSplit",
        "BertPreTokenizer",
        "Punctuation",
        "Digits",
        "UnicodeScripts",
    }
    | {"CharDelimiterSplit", "FixedLength"}
)
_MOST_GROWTH = 64.0
"""How many times as long all replacements together may make a text."""
_REPEATED_GROUP = re.compile(r"\)(?:[*+]|\{\d*,?\d*\})")
"""A repeated group: it may be ambiguous, and explode."""
_BACK_REFERENCE = re.compile(r"\\(?:[1-9]|k<|g<)")
_MOST_UNBOUNDED = 16
"""Unbounded repetitions of one alternative of an expression; each may multiply its time."""
_LONGEST_WORD = 1000
_COMPOSED = 4
"""Characters that a composing normalizer makes one of, at most."""
_RUN = re.compile(r"(.)\1{7,}", re.DOTALL)
_AT_ONCE = 64 * 1024
_CUT_RUN = 16
"""Characters of a run of one character that a cut through it hides."""


def is_bounded(tokenizer: Tokenizer) -> bool:
    """Whether the time of encoding is known to be about linear in a text's length."""
    growth = 1.0
    for step in _steps(tokenizer.normalizer, "normalizers"):
        if step.get("type") == "Replace":
            pattern, content = step.get("pattern") or {}, step.get("content", "")
            if "Regex" in pattern and not _is_plain(pattern["Regex"]):
                return False
            growth *= max(1.0, len(content) / max(1, len(pattern.get("String", "x"))))
        elif step.get("type") == "Prepend":
            growth += len(step.get("prepend", "")) / 1000
        elif step.get("type") not in _LINEAR_NORMALIZERS:
            return False
    for step in _steps(tokenizer.pre_tokenizer, "pretokenizers"):
        if step.get("type") == "Split":
            pattern = step.get("pattern") or {}
            if "Regex" in pattern and not _is_plain(pattern["Regex"]):
                return False
        elif step.get("type") not in _LINEAR_PRE_TOKENIZERS:
            return False
    longest = getattr(tokenizer.model, "max_input_chars_per_word", 0)
    return growth <= _MOST_GROWTH and longest <= _LONGEST_WORD


def _is_plain(expression: str) -> bool:
    """Whether an expression repeats no group and refers to none, as those of published models."""
    expression = re.sub(r"\\[^1-9kg]", "x", expression)
    before = ""
    while before != expression:  # classes may be nested
        before, expression = expression, re.sub(r"\[[^\[\]]*\]", "x", expression)
    if _REPEATED_GROUP.search(expression) or _BACK_REFERENCE.search(expression):
        return False
    return all(len(re.findall(r"[*+]", part)) <= _MOST_UNBOUNDED for part in expression.split("|"))


@dataclass(frozen=True, slots=True)
class TokenLengths:
    """How many characters a token stands for, at most.

    Attributes:
        longest: Characters of the longest token.
        longest_beside_runs: The same without runs of one character (spaces, dashes): vocabularies have long tokens of those.
        composes: Whether the normalizer may make one character of several.
    """

    longest: int
    longest_beside_runs: int
    composes: bool

    def exceeds(self, text: str, most: int) -> bool:
        """Whether a text must have more than ``most`` tokens. O(1) for a short text, else O(``most``) for usual ones."""
        factor = _COMPOSED if self.composes and not text.isascii() else 1
        if len(text) <= most * self.longest_beside_runs * factor:
            return False
        if len(text) > most * self.longest * factor:
            return True
        left = most * self.longest_beside_runs * factor
        for start in range(0, len(text), _AT_ONCE):
            left -= max(0, len(_RUN.sub("", text[start : start + _AT_ONCE])) - _CUT_RUN)
            if left < 0:
                return True
        return False

    def least(self, text: str, most: int) -> int:
        """A number of tokens, above ``most``, that a text that exceeds it has at least."""
        factor = _COMPOSED if self.composes and not text.isascii() else 1
        return max(most + 1, len(text) // (self.longest * factor))


def token_lengths(tokenizer: Tokenizer) -> TokenLengths | None:
    """The lengths; None where a token may stand for any number of characters, or characters may get no token."""
    model = tokenizer.model
    normalizers = [*_steps(tokenizer.normalizer, "normalizers")]
    pre_tokenizers = [*_steps(tokenizer.pre_tokenizer, "pretokenizers")]
    by_bytes = any(step.get("type") == "ByteLevel" for step in (*pre_tokenizers, *normalizers))
    if not isinstance(model, models.BPE | models.Unigram) or not (by_bytes or getattr(model, "byte_fallback", False)):
        return None  # an unknown word may be one token
    for step in normalizers:
        kind = step.get("type")
        if kind == "Replace":
            pattern = (step.get("pattern") or {}).get("String")
            if not pattern or len(step.get("content", "")) < len(pattern):
                return None
        elif kind not in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Prepend", "ByteLevel"):
            return None
    for step in pre_tokenizers:
        kind = step.get("type")
        if kind == "Split" and step.get("behavior") == "Removed":
            return None
        if kind not in ("Split", "ByteLevel", "Metaspace", "Digits", "UnicodeScripts"):
            return None
    if any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values()):
        return None
    longest = beside_runs = 1
    for token in tokenizer.get_vocab():
        if len(token) > beside_runs:
            longest = max(longest, len(token))
            beside_runs = max(beside_runs, len(_RUN.sub("", token)))
    composes = any(step.get("type") in ("NFC", "NFKC") for step in normalizers)
    return TokenLengths(longest, beside_runs, composes)


def _steps(component: Any, many: str) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer or a pre-tokenizer, those of sequences one by one."""
    if component is None:
        return
    waiting = [json.loads(component.__getstate__())]
    while waiting:
        step = waiting.pop(0)
        if step.get("type") == "Sequence":
            waiting = [*step.get(many, ()), *waiting]
        else:
            yield step
