"""Paces the reporting of many tokens: a long prompt with many alternatives takes seconds, and other requests run meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from sapwood_net.pacing.heavy_work import Stint
from sapwood_router.request.context import Likelihoods, RequestContext
from sapwood_router.request.tokens import pieces
from sapwood_router.tokenizer.client import TokenizerClient
from sapwood_text.vocabulary import Vocabulary

_AT_ONCE = 32
"""Tokens that are reported without a pause: about a millisecond with the most alternatives."""


class Telling:
    """What one answer tells of tokens.

    Args:
        tokenizer: Knows their texts.
        stint: Whose turns the pieces have; a few tokens, as a stream has them, need none.
    """

    def __init__(self, tokenizer: TokenizerClient, stint: Stint) -> None:
        self._tokenizer = tokenizer
        self._stint = stint
        self._told = 0
        """Tokens reported since the last turn."""

    async def pieces(
        self, ids: Sequence[int], logprobs: Sequence[Likelihoods | None]
    ) -> AsyncIterator[tuple[Sequence[int], Sequence[Likelihoods | None]]]:
        """Tokens and what is known of each, a few at a time; the first few at once."""
        self._told = 0
        for some, found in zip(pieces(ids, _AT_ONCE), pieces(logprobs, _AT_ONCE), strict=False):
            if self._told + len(some) > _AT_ONCE:
                self._told = 0
                await self._stint.pause()
            self._told += len(some)
            yield some, found

    async def vocabulary(self, context: RequestContext) -> Vocabulary:
        """What the tokens of a request stand for.

        Raises:
            SapwoodError: The tokenizer does not say.
        """
        return await self._tokenizer.vocabulary(context.request_id, context.deadline)
