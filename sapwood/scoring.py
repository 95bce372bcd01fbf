"""The request to score continuations of a prompt and its answer, as plain Python values."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from sapwood.request import build_request
from sapwood.v1 import common_pb2, router_pb2


@dataclass(frozen=True, slots=True)
class Continuation:
    """A text or tokens that may follow a prompt, and what may follow these.

    Attributes:
        content: The text, or token ids.
        next: What continues it; all of a tree are texts, or all are tokens.
    """

    content: str | Sequence[int]
    next: Sequence[Continuation] = field(default=())


@dataclass(frozen=True, slots=True)
class ContinuationScore:
    """How likely a continuation is, with all that it continues.

    Attributes:
        token_ids: Its tokens, from the first on that the prompt by itself does not have: the tokenizer may join their texts.
        logprobs: The natural logarithm of each one's probability.
        unconditional: The same without the prompt, 0 for the first; empty unless asked for.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    unconditional: tuple[float, ...]

    @property
    def logprob(self) -> float:
        """That of the whole."""
        return sum(self.logprobs)


@dataclass(frozen=True, slots=True)
class Scores:
    """One score for each continuation, depth first, and the tokens of prompt and continuations that were computed for them."""

    scores: tuple[ContinuationScore, ...]
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    model: str


class ScoreOptions(TypedDict, total=False):
    """How continuations are scored.

    Attributes:
        model: The model's name; the only one there is if left out.
        request_id: As for ``generate``, and so are the next five.
        lora_name, continue_final_message, add_special_tokens, template_variables: The same.
        unconditional: Whether they are scored without the prompt, too.
    """

    model: str | None
    request_id: str
    lora_name: str
    continue_final_message: bool
    add_special_tokens: bool
    template_variables: Mapping[str, Any]
    unconditional: bool


def build_score_request(
    continuations: Iterable[str | Sequence[int] | Continuation],
    text: str | None,
    messages: Iterable[Mapping[str, Any]] | None,
    token_ids: Iterable[int] | None,
    options: ScoreOptions,
) -> router_pb2.RouterScoreRequest:
    """The request message.

    Raises:
        ValueError: There is no such option, or not exactly one prompt, or a token id is beyond what its field can hold.
        TypeError: A continuation is neither text nor token ids.
    """
    given: dict[str, Any] = {**options}
    if (variables := given.pop("template_variables", None)) is not None:
        given["template_variables"] = json.dumps(dict(variables), ensure_ascii=False)
    request = router_pb2.RouterScoreRequest(continuations=map(_message, continuations), **given)
    prompt = build_request(text, messages, token_ids, {})
    kind = prompt.WhichOneof("prompt")
    if kind == "text":
        request.text = prompt.text
    elif kind == "messages":
        request.messages.CopyFrom(prompt.messages)
    else:
        request.tokens.CopyFrom(prompt.tokens)
    return request


def to_scores(response: router_pb2.RouterScoreResponse) -> Scores:
    """The scores of a response."""
    scores = tuple(
        ContinuationScore(tuple(each.token_ids), tuple(each.logprobs), tuple(each.unconditional_logprobs))
        for each in response.scores
    )
    return Scores(scores, response.prompt_tokens, response.cached_tokens, response.computed_tokens, response.model)


def _message(given: str | Sequence[int] | Continuation) -> router_pb2.Continuation:
    if not isinstance(given, Continuation):
        given = Continuation(given)
    below = map(_message, given.next)
    if isinstance(given.content, str):
        return router_pb2.Continuation(text=given.content, next=below)
    return router_pb2.Continuation(tokens=common_pb2.TokenIds(ids=given.content), next=below)
