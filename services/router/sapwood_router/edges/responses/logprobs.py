"""``logprobs`` of a message: those of its text's tokens, not of what is reasoned before it, nor of calls after it.

A delta may have the end of the reasoning, the text after it, and tokens whose text is not shown yet, and nothing marks which is
which. So the text is looked for in what the tokens say, which it is a part of.
"""

from __future__ import annotations

import codecs
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from sapwood_router.edges.http.json_list import JsonList
from sapwood_router.edges.openai.logprobs import chat_token, text_of
from sapwood_router.edges.telling import Telling
from sapwood_router.request.context import Delta, RequestContext, TokenLogprobs
from sapwood_text.vocabulary import Vocabulary


class TextLogprobs:
    """Finds the tokens of one answer's text as its output comes.

    Args:
        context: The request.
        telling: Tells of tokens.
    """

    silent = False

    def __init__(self, context: RequestContext, telling: Telling) -> None:
        self._context = context
        self._telling = telling
        self._ids: list[int] = []
        """Tokens whose text was not shown yet, or that have no text."""
        self._logprobs: list[TokenLogprobs] = []
        self._found = JsonList()

    async def read(self, delta: Delta) -> None:
        """Takes the next output.

        Raises:
            SapwoodError: The tokenizer does not say what the tokens are.
        """
        self._ids += delta.token_ids[: delta.text_tokens]
        self._logprobs += delta.logprobs[: delta.text_tokens]
        output = delta.output
        if not (self._ids and (output.reasoning or output.text)):
            return
        vocabulary = await self._telling.vocabulary(self._context)
        whole, starts = _spell(self._ids, vocabulary)
        at = 0
        if output.reasoning:
            at = _end(whole, output.reasoning, at)
        written = 0
        calls = any(call.name for call in output.tool_calls)
        for start, end in _places(whole, starts, output.text, at, calls=calls):
            at = end
            first = max(bisect_right(starts, start) - 1, written)
            while first > written and starts[first - 1] == starts[first]:  # a character may be of several tokens
                first -= 1
            written = max(bisect_left(starts, at), first)
            async for some, found in self._telling.pieces(self._ids[first:written], self._logprobs[first:written]):
                pairs = zip(some, found, strict=True)
                self._found.add(
                    [
                        chat_token(token, each, vocabulary, text_of)
                        for token, each in pairs
                        if each is not None and token not in vocabulary.special_ids
                    ]
                )
        left = bisect_left(starts, at)
        del self._ids[:left], self._logprobs[:left]

    def take(self) -> Any:
        """The tokens of the text that came since the last call: a list of ``ChatToken``, in JSON already."""
        return self._found.take()


def _end(whole: str, text: str, at: int) -> int:
    """Where a text ends in a longer one, from some place on; if it is not there, the longer one's end."""
    found = whole.find(text, at)
    return len(whole) if found < 0 else found + len(text)


def _places(whole: str, starts: list[int], text: str, at: int, *, calls: bool) -> Iterator[tuple[int, int]]:
    """Where a text begins and ends in what the tokens say, from some place on: in several pieces if calls are between them.

    Args:
        whole: The tokens' text.
        starts: Where each token begins in it; ascending.
        text: The text.
        at: Where it may begin.
        calls: Whether calls begin there, too: then what is found in one piece is taken to be before them.
    """
    while text:
        # The longest beginning of it that is there: any shorter one is there, too.
        size = bisect_right(range(1, len(text) + 1), 0, key=lambda size: whole.find(text[:size], at) < 0)
        if size == 0:  # it was changed since: then all that is left may be it
            yield at, len(whole)
            return
        at = _begin(whole, starts, text[:size], at, last=size == len(text) and not calls)
        yield at, at + size
        at, text, calls = at + size, text[size:], False


def _begin(whole: str, starts: list[int], text: str, at: int, *, last: bool) -> int:
    """The place where a contained text begins, searching from a place on.

    That is there if it goes on at once. Else it comes after a mark or a call, which may say the same within a token or as a
    value, so it begins where a token does, or after the token's blanks; and what is ``last`` comes after all those.
    """
    if whole.startswith(text, at):
        return at
    find = whole.rfind if last else whole.find
    place = any_place = find(text, at)
    while place >= 0:
        token = starts[bisect_right(starts, place) - 1]
        if not whole[token:place].strip():
            return place
        place = whole.rfind(text, at, place + len(text) - 1) if last else whole.find(text, place + 1)
    return any_place


def _spell(ids: list[int], vocabulary: Vocabulary) -> tuple[str, list[int]]:
    """The joined text of tokens, without special ones, and where each token begins in it."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    texts = [decoder.decode(b"" if token in vocabulary.special_ids else vocabulary.bytes_of(token)) for token in ids]
    return "".join(texts), list(accumulate(map(len, texts[:-1]), initial=0))
