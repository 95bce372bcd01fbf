"""``logprobs`` of OpenAI's API: a list of tokens in chats, parallel lists in completions.

A token's text is what its bytes say; bytes that are no whole character show as U+FFFD, and chats have them beside the text.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from sapwood_router.request.logprobs import TokenLogprobs
from sapwood_router.request.tokens import TokenTable


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


class PromptToken(msgspec.Struct):
    """A token that a prompt has, or could have had, in ``prompt_logprobs``."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptToken] | None]
"""``prompt_logprobs``: of each token of a prompt, by ids; named as in vLLM."""


class CompletionLogprobs(msgspec.Struct):
    """``logprobs`` of a completion; ``text_offset`` counts characters from the beginning of its text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


TokenName = Callable[[int, TokenTable], str]
"""How tokens are shown."""


def text_of(token: int, table: TokenTable) -> str:
    """A token's bytes as text."""
    return table[token].decode("utf-8", "replace")


def number_of(token: int, table: TokenTable) -> str:
    """A token by its id, as vLLM shows it where ``return_tokens_as_token_ids`` is set."""
    return f"token_id:{token}"


def chat_tokens(
    ids: Sequence[int], logprobs: Sequence[TokenLogprobs], table: TokenTable, name: TokenName
) -> list[ChatToken]:
    """The tokens of a piece of an answer."""
    return [_chat_token(token, found, table, name) for token, found in zip(ids, logprobs, strict=False)]


def chat_object(tokens: list[ChatToken]) -> dict[str, Any]:
    """``logprobs`` of a choice."""
    return {"content": tokens, "refusal": None}


class CompletionWriter:
    """Makes the lists of one choice, piece after piece.

    Args:
        shows_special: Whether the text has the special tokens, too.
        name: How tokens are shown.
    """

    def __init__(self, shows_special: bool, name: TokenName) -> None:
        self._name = name
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
            made.tokens.append(self._name(token, table))
            made.token_logprobs.append(None if found is None else found.logprob)
            made.top_logprobs.append(None if found is None else _alternatives(token, found, table, self._name))
            made.text_offset.append(self._offset)
            if self._shows_special or token not in table.special:
                self._offset += len(self._decoder.decode(written))
        return made


def prompt_object(ids: Sequence[int], logprobs: Sequence[TokenLogprobs], table: TokenTable) -> PromptLogprobs:
    """``prompt_logprobs`` as vLLM has it: nothing for the first token, for each other itself and the likeliest in its place.

    ``rank`` is null for a token that is not among those.
    """
    made: PromptLogprobs = [None]
    for token, found in zip(ids[1:], logprobs, strict=True):
        told = zip([token, *found.top_ids], [found.logprob, *found.top_logprobs], strict=True)
        ranks = {other: rank for rank, other in enumerate(found.top_ids, 1)}
        made.append(
            {str(other): PromptToken(logprob, ranks.get(other), text_of(other, table)) for other, logprob in told}
        )
    return made


def _chat_token(token: int, found: TokenLogprobs, table: TokenTable, name: TokenName) -> ChatToken:
    alternatives = [
        TokenAlternative(name(other, table), logprob, list(table[other]))
        for other, logprob in zip(found.top_ids, found.top_logprobs, strict=True)
    ]
    return ChatToken(name(token, table), found.logprob, list(table[token]), alternatives)


def _alternatives(token: int, found: TokenLogprobs, table: TokenTable, name: TokenName) -> dict[str, float]:
    """The likeliest, and always the token itself."""
    made: dict[str, float] = {}
    for other, logprob in zip(found.top_ids, found.top_logprobs, strict=True):
        made.setdefault(name(other, table), logprob)  # the likeliest of those that look the same
    made.setdefault(name(token, table), found.logprob)
    return made
