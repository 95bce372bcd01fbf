"""``POST /v1/completions``."""

from __future__ import annotations

import time
from functools import lru_cache, partial
from itertools import product
from typing import Any

import msgspec

from sapwood_common.contract.limits import MOST_CONTINUATIONS, MOST_GAPS
from sapwood_common.errors import InvalidArgumentError
from sapwood_net.pacing.heavy_work import A_FEW
from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.edges.http.json_body import convert, decode_object
from sapwood_router.edges.openai.annotate import Annotator
from sapwood_router.edges.openai.answer import Answer, send_answer, usage_object
from sapwood_router.edges.openai.logprobs import CompletionWriter
from sapwood_router.edges.openai.other_parameters import COMPLETION_NEUTRAL
from sapwood_router.edges.openai.parameters import (
    BESIDE,
    StreamWish,
    output_of,
    sampling_of,
    stream_wish,
    token_name,
    truncation_of,
)
from sapwood_router.edges.openai.response_format import answer_grammar
from sapwood_router.edges.openai.sse import CompletionChunks, TokenChunks
from sapwood_router.edges.openai.types import (
    CompletionChoice,
    CompletionRequest,
    CompletionResponse,
    stop_reason,
)
from sapwood_router.flow.generation import Pipeline
from sapwood_router.request.cache_hint import cache_hint_of
from sapwood_router.request.caller import Caller
from sapwood_router.request.context import FieldNames, Prompt, RequestContext, TextPrompt, TokenPrompt, unique_id
from sapwood_router.request.tokens import are_tokens
from sapwood_router.request.validation import check_n, continuations

DEFAULT_MAX_TOKENS = 16
MAX_CHOICES = 1024


async def complete(exchange: Exchange, body: bytes, pipeline: Pipeline, deadline: float) -> None:
    """Answers a request.

    Raises:
        SapwoodError: It is wrong, or it failed.
    """
    given = decode_object(body)
    del body
    request = convert(given, CompletionRequest, COMPLETION_NEUTRAL, BESIDE, left_out=exchange.left_out)
    wish = stream_wish(request, exchange.left_out)
    stream = wish is not StreamWish.WHOLE
    echo, prompt_only = request.echo is True, request.echo is True and request.max_tokens == 0
    deadline = deadline if stream else exchange.sooner(deadline)
    exchange.accept_body_id(request)
    caller = exchange.caller(request, given)
    named = _prompts(request)
    contexts, count = await _contexts(request, given, named, caller, exchange.request_id, deadline, pipeline)
    best = 1 if request.n is None else request.n
    if best < count and stream:
        raise InvalidArgumentError(
            "best_of is not served with stream: which answers are the best is known at their end", field="best_of"
        )
    if request.session is not None and (len(contexts) > 1 or echo):
        raise InvalidArgumentError("a session goes on with one prompt and one answer, without echo", field="session")
    answer_id, created = f"cmpl-{exchange.request_id}", int(time.time())
    shows_special = request.skip_special_tokens is False
    writer = None if request.logprobs is None else partial(CompletionWriter, shows_special, token_name(request))
    tokenizer, tells_prompt = pipeline.tokenizers.of(request.model), given.get("prompt_logprobs") is not None
    stint, of_prompt = pipeline.heavy.stint(caller.tenant), {"prompt_only": prompt_only, "tells_prompt": tells_prompt}
    annotator = Annotator(contexts, tokenizer, writer, stint, echo=echo, **of_prompt)

    shows_prompt = request.return_token_ids is True
    shows_tokens = shows_prompt or request.detokenize is False

    async def make_choice(index: int, answer: Answer) -> CompletionChoice:
        return CompletionChoice(
            *(index, answer.output.text, answer.finish.reason.value, answer.logprobs),
            token_ids=answer.token_ids if shows_tokens else msgspec.UNSET,
            prompt_token_ids=list(contexts[answer.index].token_ids) if shows_prompt else msgspec.UNSET,
            prompt_logprobs=await annotator.prompt_logprobs(answer.index),
            stop_reason=stop_reason(answer.finish),
        )

    async def make_body(answers: list[Answer]) -> CompletionResponse:
        usage = usage_object([answer.finish.usage for answer in answers], count)
        if best < count:
            answers = _likeliest(answers, count, best)
        choices: list[CompletionChoice] = []
        for answer in answers:
            if len(choices) % A_FEW == A_FEW - 1:
                await pipeline.heavy.turn(caller.tenant, goes_on=True)
            choices.append(await make_choice(len(choices), answer))
        return CompletionResponse(
            id=answer_id, created=created, model=contexts[0].public_model, choices=choices, usage=usage
        )

    events: CompletionChunks | None = None
    if stream and shows_tokens:
        events = TokenChunks(answer_id, contexts, wish, annotator, count, shows_prompt=shows_prompt)
    elif stream:
        events = CompletionChunks(answer_id, contexts, wish, annotator, count)
    turn = None
    if request.session is not None:
        turn = contexts[0].session = await pipeline.sessions.begin(caller.tenant, request.session, contexts[0].model)
    try:
        await send_answer(exchange, pipeline, contexts, annotator, make_body, events)
    finally:
        if turn is not None:
            turn.release()


async def _contexts(
    request: CompletionRequest,
    given: dict[str, Any],
    named: list[tuple[str, Prompt]],
    caller: Caller,
    request_id: str,
    deadline: float,
    pipeline: Pipeline,
) -> tuple[list[RequestContext], int]:
    """One for each choice, those of a prompt together, made a few at a time; and how many each prompt has."""
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    if request.echo and request.detokenize is False:
        raise InvalidArgumentError("echo is of the text, which detokenize false leaves out", field="echo")
    if request.echo and request.suffix:
        raise InvalidArgumentError(
            "echo is not served with suffix: the prompt does not end with the text", field="echo"
        )
    if request.echo and max_tokens == 0:
        max_tokens = 1  # a worker generates at least one; it is dropped
    grammar, grammar_field = answer_grammar(request)
    output = output_of(request)
    fields = _fields("prompt", grammar_field)
    own = {"max_tokens": max_tokens}
    if request.echo and request.logprobs is not None:
        own["prompt_logprobs"] = request.logprobs
    count = 1 if request.n is None else request.n
    check_n(count, fields)
    if request.best_of is not None:
        if not count <= request.best_of <= MOST_CONTINUATIONS:
            raise InvalidArgumentError(
                f"best_of must be in n..{MOST_CONTINUATIONS}, here {count}..{MOST_CONTINUATIONS}, got {request.best_of}",
                field="best_of",
            )
        if count < request.best_of and request.logprobs is None:
            own["logprobs"] = 0  # to tell which are the best
        count = request.best_of
    sampling = sampling_of(given, fields, pipeline.seeds, **own)
    if request.suffix and any(isinstance(prompt, TokenPrompt) for _, prompt in named):
        raise InvalidArgumentError("suffix goes with a prompt of text", field="suffix")
    if request.suffix and len(named) > MOST_GAPS:
        raise InvalidArgumentError(f"at most {MOST_GAPS} prompts go with a suffix, got {len(named)}", field="suffix")
    settings = continuations(sampling, count, fields)
    if len(named) * len(settings) > MAX_CHOICES:
        raise InvalidArgumentError(
            f"at most {MAX_CHOICES} choices a request", field="prompt" if len(named) > 1 else "n"
        )
    bad_words = tuple(word.lstrip() for word in request.bad_words or ())
    hint = cache_hint_of(request.cache_hint, given)
    contexts: list[RequestContext] = []
    for (name, prompt), each in product(named, settings):
        if len(contexts) % A_FEW == A_FEW - 1:
            await pipeline.heavy.turn(caller.tenant, goes_on=True)
        contexts.append(
            RequestContext(
                request_id=request_id,
                worker_request_id=unique_id(request_id),
                prompt=prompt,
                sampling=each,
                output=output,
                fields=_fields(name, grammar_field),
                deadline=deadline,
                caller=caller,
                hint=hint,
                model=request.model,
                lora=request.lora_path or "",
                truncation=truncation_of(request),
                bad_words=bad_words,
                whole=not request.stream,
                detokenize=request.detokenize is not False,
                grammar=grammar,
            )
        )
    return contexts, len(settings)


def _likeliest(answers: list[Answer], count: int, best: int) -> list[Answer]:
    """Of each prompt's ``count`` answers the ``best`` ones: those whose tokens are likeliest on average."""
    kept: list[Answer] = []
    for start in range(0, len(answers), count):
        kept += sorted(answers[start : start + count], key=lambda answer: -answer.mean_logprob)[:best]
    return kept


@lru_cache(maxsize=64)
def _fields(prompt: str, grammar: str) -> FieldNames:
    return FieldNames(prompt=prompt, sampling="", max_tokens="max_tokens", grammar=grammar, lora="lora_path")


def _prompts(request: CompletionRequest) -> list[tuple[str, Prompt]]:
    """The prompts and their names in errors."""
    value, suffix, add_special = request.prompt, request.suffix or "", request.add_special_tokens is not False
    if suffix and not add_special:
        raise InvalidArgumentError("a prompt with a suffix has special tokens", field="add_special_tokens")
    if isinstance(value, str):
        return [("prompt", TextPrompt(value, suffix, add_special))]
    if value is None:
        raise InvalidArgumentError("prompt is required", field="prompt")
    if not isinstance(value, list):
        raise InvalidArgumentError("prompt must be a string, strings, token ids or lists of token ids", field="prompt")
    if not value:
        raise InvalidArgumentError("the prompt is empty; it needs a text or a token at least", field="prompt")
    if are_tokens(value):
        return [("prompt", TokenPrompt(value))]
    if len(value) > MAX_CHOICES:
        raise InvalidArgumentError(f"at most {MAX_CHOICES} prompts a request, got {len(value)}", field="prompt")
    named: list[tuple[str, Prompt]] = []
    for index, item in enumerate(value):
        name = f"prompt[{index}]"
        if isinstance(item, str):
            named.append((name, TextPrompt(item, suffix, add_special)))
        elif isinstance(item, list) and are_tokens(item):
            named.append((name, TokenPrompt(item)))
        else:
            raise InvalidArgumentError(f"{name} must be a string or token ids", field=name)
    return named
