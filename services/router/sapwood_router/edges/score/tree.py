"""``POST /v1/score_tree``: how likely continuations of a prompt are, as a tree. No other server has it."""

from __future__ import annotations

from typing import Any

import msgspec

from sapwood_common.errors import InvalidArgumentError
from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.edges.http.json_body import FORMS, Neutral, convert, decode_object
from sapwood_router.edges.openai.chat import CHAT_FIELDS, chat_prompt
from sapwood_router.edges.openai.types import AnyRequest, ChatRequest, Message
from sapwood_router.edges.sending import told_headers
from sapwood_router.flow import score as scores
from sapwood_router.flow.generation import Pipeline
from sapwood_router.request.context import FieldNames, Prompt, TextPrompt, TokenPrompt
from sapwood_router.request.tokens import are_tokens

NEUTRAL: Neutral = {"truncate_prompt_tokens": (), "truncation_side": ()}
"""A prompt is scored as it is."""


class ScoreTreeRequest(AnyRequest, kw_only=True):
    """A prompt or messages, and continuations: each a text, a list of token ids, or an object with ``text`` or ``token_ids`` and
    ``next``, which continue it."""

    prompt: Any = None  # a text or token ids
    messages: list[Message] | None = None
    continuations: list[Any]  # texts, token ids or nodes: checked below
    unconditional: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None


class TreeScore(msgspec.Struct):
    """How likely a continuation is, with all that it continues. ``logprob`` is the sum of ``logprobs``, one for each token;
    ``text`` is null for tokens, ``unconditional_logprobs`` unless asked for."""

    index: int
    text: str | None
    token_ids: list[int]
    logprobs: list[float]
    logprob: float
    unconditional_logprobs: list[float] | None


class TreeUsage(msgspec.Struct):
    """Tokens of the prompt, how many of them were cached, and how many of prompt and continuations were computed."""

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int


class ScoreTreeResponse(msgspec.Struct, kw_only=True):
    """The answer: one score for each continuation, depth first."""

    id: str
    object: str = "score_tree"
    model: str
    scores: list[TreeScore]
    usage: TreeUsage


async def score_tree(exchange: Exchange, body: bytes, pipeline: Pipeline, deadline: float) -> None:
    """Answers a request.

    Raises:
        SapwoodError: It is wrong, or it failed.
    """
    given = decode_object(body)
    request = convert(given, ScoreTreeRequest, NEUTRAL, FORMS, left_out=exchange.left_out)
    exchange.accept_body_id(request)
    prompt, fields = await _prompt(exchange, request)
    wanted = scores.ScoreRequest(
        request_id=exchange.request_id,
        prompt=prompt,
        continuations=_Branches().read(request.continuations, scores.FIELD),
        fields=fields,
        deadline=exchange.sooner(deadline),
        caller=exchange.caller(request, given),
        model=request.model,
        unconditional=request.unconditional is True,
    )
    exchange.on_disconnect(lambda: None)
    found = await scores.score(pipeline, wanted)
    unconditional = request.unconditional is True
    answer = ScoreTreeResponse(
        id=f"score-{exchange.request_id}",
        model=found.model,
        scores=[
            TreeScore(
                index,
                path.text or None,
                path.token_ids,
                path.logprobs,
                sum(path.logprobs),
                path.unconditional if unconditional else None,
            )
            for index, path in enumerate(found.paths)
        ],
        usage=TreeUsage(found.prompt_tokens, found.cached_tokens, found.computed_tokens),
    )
    await exchange.send_body(200, msgspec.json.encode(answer), told_headers(exchange.workers, found.contexts))


async def _prompt(exchange: Exchange, request: ScoreTreeRequest) -> tuple[Prompt, FieldNames]:
    if (request.prompt is None) == (request.messages is None):
        raise InvalidArgumentError("either prompt or messages is required", field="prompt")
    if request.messages is not None:
        if request.add_special_tokens is not None:
            raise InvalidArgumentError("add_special_tokens goes with prompt only", field="add_special_tokens")
        chat = ChatRequest(
            messages=request.messages,
            chat_template_kwargs=request.chat_template_kwargs,
            continue_final_message=request.continue_final_message,
        )
        return await exchange.in_turns(chat_prompt(chat, None, exchange.left_out)), CHAT_FIELDS
    for name in ("chat_template_kwargs", "continue_final_message"):
        if getattr(request, name):
            raise InvalidArgumentError(f"{name} goes with messages only", field=name)
    fields = FieldNames(prompt="prompt")
    if isinstance(request.prompt, str):
        return TextPrompt(request.prompt, add_special=request.add_special_tokens is not False), fields
    if isinstance(request.prompt, list) and request.prompt and are_tokens(request.prompt):
        return TokenPrompt(request.prompt), fields
    raise InvalidArgumentError("a prompt is a text or token ids", field="prompt")


class _Branches:
    """Reads continuations. They are counted as they are read."""

    def __init__(self) -> None:
        self._count = 0

    def read(self, given: list[Any], name: str, depth: int = 1) -> tuple[scores.Branch, ...]:
        """Some continuations of one beginning.

        Args:
            given: They, as the client gives them.
            name: The client's name of the list.
            depth: How many levels it makes.

        Raises:
            InvalidArgumentError: One is none, or there are too many or too many levels.
        """
        self._count += len(given)
        if self._count > scores.MOST_PATHS:
            raise InvalidArgumentError(f"at most {scores.MOST_PATHS} continuations", field=scores.FIELD)
        if depth > scores.DEEPEST:
            raise InvalidArgumentError(f"at most {scores.DEEPEST} levels", field=name)
        return tuple(self._branch(each, f"{name}[{index}]", depth) for index, each in enumerate(given))

    def _branch(self, given: Any, name: str, depth: int) -> scores.Branch:
        if isinstance(given, str):
            return scores.Branch(given)
        if isinstance(given, list) and given and are_tokens(given):
            return scores.Branch(token_ids=tuple(given))
        if not isinstance(given, dict):
            raise InvalidArgumentError("a continuation is a text, token ids, or an object with one of them", field=name)
        unknown = next((key for key in given if key not in ("text", "token_ids", "next")), None)
        if unknown is not None:
            raise InvalidArgumentError(f"{str(unknown)[:40]!r} is not known", field=name)
        text, ids, below = given.get("text"), given.get("token_ids"), given.get("next") or []
        if text is not None and not isinstance(text, str):
            raise InvalidArgumentError("it is a text", field=f"{name}.text")
        if ids is not None and not (isinstance(ids, list) and ids and are_tokens(ids)):
            raise InvalidArgumentError("it is a list of token ids", field=f"{name}.token_ids")
        if not isinstance(below, list):
            raise InvalidArgumentError("it is a list of continuations", field=f"{name}.next")
        children = self.read(below, f"{name}.next", depth + 1) if below else ()
        return scores.Branch(text or "", tuple(ids or ()), children)
