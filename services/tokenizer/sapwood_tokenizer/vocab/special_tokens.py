"""Tokens that stand for no text: added to a tokenizer, put around texts, and named by the files next to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Types of tokens, numbered alike in SentencePiece and GGUF files."""


class VocabularyError(Exception):
    """The file holds no vocabulary that can be built; the message says why."""


def add_special_tokens(tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Adds control tokens as special ones and user-defined ones as others."""
    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        added = [
            AddedToken(token, special=special, normalized=False)
            for token, of_kind in zip(tokens, types, strict=True)
            if of_kind == kind and token
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)


def put_around(tokenizer: Tokenizer, opening: str | None, closing: str | None) -> None:
    """Makes texts begin and end with these tokens, if there are any."""
    ids = {token: tokenizer.token_to_id(token) for token in (opening, closing) if token is not None}
    special = [(token, index) for token, index in ids.items() if index is not None]
    if special:
        known = dict(special)
        before, after = ([token] if token in known else [] for token in (opening, closing))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after], pair=[*before, "$A", *after, "$B:1"], special_tokens=special
        )


def token_text(token: Any) -> str | None:
    """The text of a token in a configuration, which holds it by itself or as ``content``; None: there is none."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
