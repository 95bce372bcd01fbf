"""``logprobs`` of OpenAI's API: a list of tokens in chats, parallel lists in completions.

A token's text is what its bytes say; bytes that are no whole character show as U+FFFD, and chats have them beside the text.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

import msgspec

from sapwood_router.logprobs import TokenLogprobs
from sapwood_router.token_table import TokenTable


class TokenAlternative(msgspec.Struct):
    """A token that could have been, in chats."""

    token: str
    logprob: float
    bytes: list[int]


class ChatToken(msgspec.Struct):
    """A token of a chat's answer."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TokenAlternative]


class CompletionLogprobs(msgspec.Struct):
    """``logprobs`` of a completion; ``text_offset`` counts characters from the beginning of its text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


def chat_tokens(ids: Sequence[int], logprobs: Sequence[TokenLogprobs], table: TokenTable) -> list[ChatToken]:
    """The tokens of a piece of an answer."""
    return [_chat_token(token, found, table) for token, found in zip(ids, logprobs, strict=False)]


def chat_object(tokens: list[ChatToken]) -> dict[str, Any]:
    """``logprobs`` of a choice."""
    return {"content": tokens, "refusal": None}


class CompletionWriter:
    """Makes the lists of one choice, piece after piece.

    Args:
        shows_special: Whether the text has the special tokens, too.
    """

    def __init__(self, shows_special: bool) -> None:
        self._shows_special = shows_special
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(
        self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None], table: TokenTable
    ) -> CompletionLogprobs:
        """The lists of the next tokens; None for a token that has no probability: the first of a prompt."""
        made = CompletionLogprobs([], [], [], [])
        for token, found in zip(ids, logprobs, strict=False):
            written = table[token]
            made.tokens.append(text_of(written))
            made.token_logprobs.append(None if found is None else found.logprob)
            made.top_logprobs.append(None if found is None else _alternatives(token, found, table))
            made.text_offset.append(self._offset)
            if self._shows_special or token not in table.special:
                self._offset += len(self._decoder.decode(written))
        return made


def text_of(written: bytes) -> str:
    """A token's bytes as text."""
    return written.decode("utf-8", "replace")


def _chat_token(token: int, found: TokenLogprobs, table: TokenTable) -> ChatToken:
    alternatives = [
        TokenAlternative(text_of(table[other]), logprob, list(table[other]))
        for other, logprob in zip(found.top_ids, found.top_logprobs, strict=True)
    ]
    return ChatToken(text_of(table[token]), found.logprob, list(table[token]), alternatives)


def _alternatives(token: int, found: TokenLogprobs, table: TokenTable) -> dict[str, float]:
    """The likeliest, and always the token itself."""
    made: dict[str, float] = {}
    for token, logprob in zip(found.top_ids, found.top_logprobs, strict=True):
        made.setdefault(text_of(table[token]), logprob)  # the likeliest of those that look the same
    made.setdefault(text_of(table[token]), found.logprob)
    return made
