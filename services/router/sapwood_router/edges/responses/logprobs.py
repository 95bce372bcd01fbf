"""``logprobs`` of a message: those of its text's tokens, not of what is reasoned before it, nor of calls after it.

A delta may have the end of the reasoning, the text after it and tokens of which nothing is shown yet, and nothing says which is
which. So the text is looked for in what the tokens say, which it is a part of.
"""

from __future__ import annotations

import codecs
from itertools import accumulate

from sapwood_router.edges.openai.logprobs import ChatToken, chat_token, text_of
from sapwood_router.edges.telling import Telling
from sapwood_router.request.context import Delta, RequestContext
from sapwood_router.request.logprobs import TokenLogprobs
from sapwood_router.request.tokens import TokenTable


class TextLogprobs:
    """Finds the tokens of one answer's text as its output comes.

    Args:
        context: The request.
        telling: Tells of tokens.
    """

    def __init__(self, context: RequestContext, telling: Telling) -> None:
        self._context = context
        self._telling = telling
        self._ids: list[int] = []
        """Tokens of which nothing was shown yet, or that were no text."""
        self._logprobs: list[TokenLogprobs] = []
        self._found: list[ChatToken] = []

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
        table = await self._telling.table(self._context, self._ids, self._logprobs)
        whole, ends = _spell(self._ids, table)
        starts = [0, *ends[:-1]]
        start = at = 0
        if output.reasoning:
            at = _end(whole, output.reasoning, at)
        if output.text:
            start = whole.find(output.text, at)
            if start < 0:  # it was changed since: then all that is left may be it
                start, at = at, len(whole)
            else:
                at = start + len(output.text)
            first = next(
                (number for number, end in enumerate(ends) if max(end - 1, starts[number]) >= start), len(ends)
            )
            last = next((number for number in range(first, len(ends)) if starts[number] >= at), len(ends))
            async for some, found in self._telling.pieces(self._ids[first:last], self._logprobs[first:last]):
                pairs = zip(some, found, strict=True)
                self._found += [chat_token(token, each, table, text_of) for token, each in pairs if each is not None]
        left = next((number for number, begin in enumerate(starts) if begin >= at), len(ends))
        del self._ids[:left], self._logprobs[:left]

    def take(self) -> list[ChatToken]:
        """The tokens of the text that came since the last call."""
        found, self._found = self._found, []
        return found


def _end(whole: str, text: str, at: int) -> int:
    """Where a text ends in a longer one, from some place on; if it is not there, the longer one's end."""
    found = whole.find(text, at)
    return len(whole) if found < 0 else found + len(text)


def _spell(ids: list[int], table: TokenTable) -> tuple[str, list[int]]:
    """What tokens say together, special ones nothing, and where in it each one ends."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    texts = [decoder.decode(b"" if token in table.special else table[token]) for token in ids]
    return "".join(texts), list(accumulate(map(len, texts)))
