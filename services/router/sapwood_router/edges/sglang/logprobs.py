"""``return_logprob`` of ``/generate``: how likely tokens were, each as log probability, id and text.

In a stream the texts are whole so far, but each event tells of its own tokens alone, as SGLang's do.

The log probabilities are the model's own, before temperature and penalties, as everywhere here.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sapwood_common.errors import InvalidArgumentError
from sapwood_net.pacing.heavy_work import Stint
from sapwood_router.edges.http.json_list import JsonList
from sapwood_router.edges.openai.types import AnyRequest
from sapwood_router.edges.telling import Telling
from sapwood_router.request.context import Delta, Likelihoods, RequestContext
from sapwood_router.tokenizer.client import TokenizerClient
from sapwood_text.vocabulary import Vocabulary

Likelihood = tuple[float | None, int, str | None]
"""A token's log probability, its id and, if texts were asked for, its text. The first reported token of a prompt has no log
probability, as in SGLang, whose clients leave it out."""


class LogprobsRequest(AnyRequest, kw_only=True):
    """The parameters."""

    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None


class LogprobsWish(msgspec.Struct, frozen=True):
    """What is to be told.

    Attributes:
        start: The first token of the prompt that is reported; -1: none is.
        top: How many likeliest alternatives are reported for each token.
        texts: Whether tokens' texts are reported.
    """

    start: int
    top: int
    texts: bool

    def settings(self) -> dict[str, int | None]:
        """The same as sampling settings."""
        if self.start < 0:
            return {"logprobs": self.top}
        return {"logprobs": self.top, "prompt_logprobs": self.top, "prompt_logprobs_start": self.start}


class Told(msgspec.Struct, kw_only=True):
    """The log probabilities of an answer, by SGLang's names; fields that were not asked for are missing."""

    input_token_logprobs: list[Likelihood] | msgspec.UnsetType = msgspec.UNSET
    output_token_logprobs: list[Likelihood] | msgspec.UnsetType = msgspec.UNSET
    input_top_logprobs: list[list[Likelihood] | None] | msgspec.UnsetType = msgspec.UNSET
    output_top_logprobs: list[list[Likelihood]] | msgspec.UnsetType = msgspec.UNSET
    output_token_logprobs_length: int | msgspec.UnsetType = msgspec.UNSET


def wish_of(request: LogprobsRequest) -> LogprobsWish | None:
    """The log probabilities that a request wants; None: none.

    Raises:
        InvalidArgumentError: A number makes no sense.
    """
    start = -1 if request.logprob_start_len is None else request.logprob_start_len
    top = request.top_logprobs_num or 0
    if start < -1:
        raise InvalidArgumentError(f"it must be at least -1, got {start}", field="logprob_start_len")
    if not request.return_logprob:  # then the others say nothing, as with SGLang, whose clients always send them
        return None
    return LogprobsWish(start, top, request.return_text_in_logprobs is True)


async def tell(
    answer: Told,
    context: RequestContext,
    token_ids: Sequence[int],
    wish: LogprobsWish,
    tokenizer: TokenizerClient,
    stint: Stint,
) -> None:
    """Tells of an answer.

    Args:
        answer: Is filled.
        context: The request, when it has ended.
        token_ids: The answer's tokens.
        wish: What is wanted.
        tokenizer: Knows tokens' texts.
        stint: Whose turns the pieces have: a long prompt with many alternatives takes half a second.

    Raises:
        SapwoodError: The tokenizer does not say what the tokens are.
    """
    prompt = context.token_ids[wish.start :] if wish.start >= 0 else []
    of_prompt: list[Likelihoods | None] = []
    if prompt:
        of_prompt = [None, *context.prompt_logprobs[len(context.prompt_logprobs) - len(prompt) + 1 :]]
    of_answer = context.logprobs[: len(token_ids)]
    vocabulary: Vocabulary | None = None
    telling = Telling(tokenizer, stint)
    if wish.texts:
        vocabulary = await telling.vocabulary(context)
    lists = [JsonList() for _ in range(4)]
    for ids, found, chosen, alternatives in (
        (prompt, of_prompt, lists[0], lists[1]),
        (token_ids, of_answer, lists[2], lists[3]),
    ):
        async for its, piece in telling.pieces(ids, found):
            pairs = zip(its, piece, strict=True)
            chosen.add(
                [_likelihood(None if each is None else each.logprob, token, vocabulary) for token, each in pairs]
            )
            if wish.top:
                alternatives.add([None if each is None else _alternatives(each, vocabulary) for each in piece])
    answer.input_token_logprobs, answer.output_token_logprobs = lists[0].take(), lists[2].take()
    if wish.top:
        answer.input_top_logprobs, answer.output_top_logprobs = lists[1].take(), lists[3].take()


class StreamedLogprobs:
    """Implements :class:`~sapwood_router.edges.sending.Reader`: each event tells of its own tokens, and how many that is so far.

    Args:
        context: The request.
        wish: What is wanted.
        tokenizer: Knows tokens' texts.
        stint: Whose turns long pieces have.
    """

    silent = False

    def __init__(self, context: RequestContext, wish: LogprobsWish, tokenizer: TokenizerClient, stint: Stint) -> None:
        self._context = context
        self._wish = wish
        self._telling = Telling(tokenizer, stint)
        self._tokens: list[Likelihood] = []
        self._alternatives: list[list[Likelihood]] = []
        self._count = 0

    async def read(self, delta: Delta) -> None:
        """Raises SapwoodError if the tokenizer does not say what the tokens are."""
        vocabulary = await self._telling.vocabulary(self._context) if self._wish.texts else None
        async for ids, found in self._telling.pieces(delta.token_ids, delta.logprobs):
            pairs = [(token, each) for token, each in zip(ids, found, strict=True) if each is not None]
            self._tokens += [_likelihood(each.logprob, token, vocabulary) for token, each in pairs]
            self._alternatives += [_alternatives(each, vocabulary) for _, each in pairs]

    def tell(self, answer: Told) -> None:
        """Fills the next event: it has what was read since the last one."""
        self._count += len(self._tokens)
        answer.output_token_logprobs, answer.output_token_logprobs_length = self._tokens, self._count
        if self._wish.top:
            answer.output_top_logprobs = self._alternatives
        self._tokens, self._alternatives = [], []


def _alternatives(found: Likelihoods, vocabulary: Vocabulary | None) -> list[Likelihood]:
    return [_likelihood(*pair, vocabulary) for pair in zip(found.top_logprobs, found.top_ids, strict=True)]


def _likelihood(logprob: float | None, token: int, vocabulary: Vocabulary | None) -> Likelihood:
    return logprob, token, None if vocabulary is None else vocabulary.bytes_of(token).decode("utf-8", "replace")
