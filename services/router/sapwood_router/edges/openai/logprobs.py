"""``logprobs`` of OpenAI's API: a list of tokens in chats, parallel lists in completions.

A token's text is what its bytes say; bytes that are no whole character show as U+FFFD, and chats have them beside the text.
All is written in pieces: a long prompt with many alternatives takes seconds and megabytes.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from sapwood_router.edges.http.json_list import JsonList
from sapwood_router.request.context import Likelihoods
from sapwood_text.vocabulary import Vocabulary


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


class ChatLogprobs(msgspec.Struct):
    """``logprobs`` of a choice of a chat."""

    content: list[ChatToken]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """``logprobs`` of a completion; ``text_offset`` counts characters from the beginning of its text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


TokenName = Callable[[int, Vocabulary], str]
"""How tokens are shown."""


def text_of(token: int, vocabulary: Vocabulary) -> str:
    """A token's bytes as text."""
    return vocabulary.bytes_of(token).decode("utf-8", "replace")


def number_of(token: int, vocabulary: Vocabulary) -> str:
    """A token by its id, as vLLM shows it where ``return_tokens_as_token_ids`` is set."""
    return f"token_id:{token}"


class ChatWriter:
    """Writes the tokens of one choice of a chat.

    Args:
        name: How tokens are shown.
    """

    def __init__(self, name: TokenName) -> None:
        self._name = name
        self._tokens = JsonList()

    def add(self, ids: Sequence[int], logprobs: Sequence[Likelihoods | None], vocabulary: Vocabulary) -> None:
        """Takes the next tokens."""
        self._tokens.add(
            [
                chat_token(token, found, vocabulary, self._name)
                for token, found in zip(ids, logprobs, strict=False)
                if found is not None
            ]
        )

    def take(self) -> Any:
        """What is new: :class:`ChatLogprobs` in JSON."""
        return msgspec.Raw(msgspec.json.encode(ChatLogprobs(self._tokens.take())))


class CompletionWriter:
    """Writes the lists of one choice.

    Args:
        shows_special: Whether the text has the special tokens, too.
        name: How tokens are shown.
    """

    def __init__(self, shows_special: bool, name: TokenName) -> None:
        self._name = name
        self._shows_special = shows_special
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._lists = {name: JsonList() for name in CompletionLogprobs.__struct_fields__}

    def add(self, ids: Sequence[int], logprobs: Sequence[Likelihoods | None], vocabulary: Vocabulary) -> None:
        """Takes the next tokens; None for a token that has no probability: the first of a prompt."""
        made = CompletionLogprobs([], [], [], [])
        for token, found in zip(ids, logprobs, strict=False):
            written = vocabulary.bytes_of(token)
            made.tokens.append(self._name(token, vocabulary))
            made.token_logprobs.append(None if found is None else found.logprob)
            made.top_logprobs.append(None if found is None else _alternatives(token, found, vocabulary, self._name))
            made.text_offset.append(self._offset)
            if self._shows_special or token not in vocabulary.special_ids:
                self._offset += len(self._decoder.decode(written))
        for name, items in self._lists.items():
            items.add(getattr(made, name))

    def take(self) -> Any:
        """What is new: :class:`CompletionLogprobs` in JSON."""
        return msgspec.Raw(msgspec.json.encode({name: items.take() for name, items in self._lists.items()}))


def prompt_entries(
    ids: Sequence[int], logprobs: Sequence[Likelihoods | None], vocabulary: Vocabulary
) -> PromptLogprobs:
    """A piece of ``prompt_logprobs`` as vLLM has it: nothing for the first token, for others themselves and the likeliest there.

    ``rank`` is null for a token that is not among those.
    """
    made: PromptLogprobs = []
    for token, found in zip(ids, logprobs, strict=True):
        if found is None:
            made.append(None)
            continue
        alternatives = zip([token, *found.top_ids], [found.logprob, *found.top_logprobs], strict=True)
        ranks = {other: rank for rank, other in enumerate(found.top_ids, 1)}
        made.append(
            {
                str(other): PromptToken(logprob, ranks.get(other), text_of(other, vocabulary))
                for other, logprob in alternatives
            }
        )
    return made


def chat_token(token: int, found: Likelihoods, vocabulary: Vocabulary, name: TokenName) -> ChatToken:
    """A token of an answer."""
    alternatives = [
        TokenAlternative(name(other, vocabulary), logprob, list(vocabulary.bytes_of(other)))
        for other, logprob in zip(found.top_ids, found.top_logprobs, strict=True)
    ]
    return ChatToken(name(token, vocabulary), found.logprob, list(vocabulary.bytes_of(token)), alternatives)


def _alternatives(token: int, found: Likelihoods, vocabulary: Vocabulary, name: TokenName) -> dict[str, float]:
    """The likeliest, and always the token itself."""
    made: dict[str, float] = {}
    for other, logprob in zip(found.top_ids, found.top_logprobs, strict=True):
        made.setdefault(name(other, vocabulary), logprob)  # the likeliest of those that look the same
    made.setdefault(name(token, vocabulary), found.logprob)
    return made
