"""Token healing: the prompt's last tokens are taken back where a longer token could begin with their text.

A tokenizer cuts ``http:`` into two tokens, but text that continues with ``//`` has ``://`` in one, which a model therefore hardly
ever writes after the first two. So the last tokens are left out, and the answer has to begin with their text, which the client
does not get (the idea is of Microsoft's guidance). O(log vocabulary) a request, after O(vocabulary log vocabulary) once.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

from sapwood_common.errors import InvalidArgumentError
from sapwood_router.request.context import AnswerGrammar, ChatPrompt, RequestContext
from sapwood_router.tokenizer.client import TokenizerClient
from sapwood_text.vocabulary import Vocabulary

_MOST = 4
"""Tokens that are taken back at most."""
_SPECIAL = re.compile(r"[^\w\s]", re.ASCII)


def check_healing(context: RequestContext) -> None:
    """Raises InvalidArgumentError if a request asks for healing together with what rules it out."""
    others = {
        "messages": isinstance(context.prompt, ChatPrompt),
        "a grammar": context.grammar is not None,
        "ignore_eos": context.sampling.ignore_eos,
        "a session": context.session is not None,
        "a suffix": bool(getattr(context.prompt, "suffix", "")),
    }
    for name, given in others.items():
        if given:
            raise InvalidArgumentError(f"token_healing does not go with {name}", field=context.fields.healing)


async def heal(context: RequestContext, tokenizer: TokenizerClient) -> None:
    """Takes the last tokens of a prepared prompt back, if need be, and sets the grammar of the answer."""
    vocabulary = await tokenizer.vocabulary(context.request_id, context.deadline)
    if not vocabulary.can_extend:
        await asyncio.to_thread(vocabulary.index_extensions)
    count, text = taken_back(context.token_ids, vocabulary, context.output.stop)
    if count:
        context.token_ids = context.token_ids[: len(context.token_ids) - count]
        context.healed = text
        context.grammar = AnswerGrammar("regex", _pattern(text))


def taken_back(token_ids: Sequence[int], vocabulary: Vocabulary, stops: Sequence[str]) -> tuple[int, str]:
    """How many of the last tokens are taken back, and their text. None are where a stop string could begin within that text."""
    found, text, tail = 0, "", b""
    for count in range(1, min(_MOST, len(token_ids) - 1) + 1):
        token = token_ids[-count]
        spelt = b"" if token in vocabulary.special_ids else vocabulary.bytes_of(token)
        if not spelt:
            break
        tail = spelt + tail
        if not vocabulary.extends(tail):
            continue
        try:
            whole = tail.decode()
        except UnicodeDecodeError:  # it begins within a character
            continue
        found, text = count, whole
    begun = any(stop.startswith(text[place:]) or stop in text for stop in stops for place in range(len(text)))
    return (0, "") if begun else (found, text)


def _pattern(text: str) -> str:
    return _SPECIAL.sub(lambda found: "\\" + found[0] if found[0].isascii() else found[0], text) + r"(?s:.*)"
