"""Messages of router.proto to the router's own types and back."""

from __future__ import annotations

import asyncio

from msgspec import structs

from sapwood.v1 import common_pb2, router_pb2, worker_pb2
from sapwood_common.errors import InvalidArgumentError
from sapwood_common.grammar.convert import to_grammar
from sapwood_net.pacing.steps import Steps
from sapwood_router.edges.worker_names import WorkerNames
from sapwood_router.flow.score import Branch, ScoreRequest, Scores
from sapwood_router.flow.sessions import Session
from sapwood_router.request.cache_hint import NO_HINT, CacheHint
from sapwood_router.request.caller import Caller
from sapwood_router.request.context import (
    AnswerGrammar,
    ChatPrompt,
    Delta,
    FieldNames,
    FinishReason,
    PictureSource,
    Prompt,
    TextPrompt,
    TokenPrompt,
    ToolCall,
    ToolChoice,
    Truncation,
    Turn,
    Usage,
)
from sapwood_router.request.embed_request import Embeddings, EmbedRequest, TextPair
from sapwood_router.request.tokens import MANY, gather, gather_many
from sapwood_router.routing.worker_view import Load

_TO_PROTO = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: common_pb2.FINISH_REASON_ABORT,
}

_TEXT, _MESSAGES, _TOKENS = FieldNames("text"), FieldNames("messages.messages"), FieldNames("tokens.ids")
"""How clients spell the fields of a request with each kind of prompt."""
_FREE = ToolChoice()


def prompt_of(request: router_pb2.RouterGenerateRequest) -> Steps[tuple[Prompt, FieldNames]]:
    """The prompt of a request, and how to name it in errors.

    Raises:
        InvalidArgumentError: No prompt is set, or what goes with another kind of prompt is.
    """
    if request.suffix and request.WhichOneof("prompt") != "text":
        raise InvalidArgumentError("suffix goes with text only", field="suffix")
    if request.HasField("add_special_tokens") and (request.suffix or request.WhichOneof("prompt") != "text"):
        raise InvalidArgumentError("add_special_tokens goes with text only, without suffix", field="add_special_tokens")
    tools = "" if request.tool_choice == router_pb2.TOOL_CHOICE_NONE else request.tools
    if request.tools and request.WhichOneof("prompt") != "messages":
        raise InvalidArgumentError("tools go with messages only", field="tools")
    if request.WhichOneof("prompt") != "messages":
        for name, given in (
            ("template_variables", request.template_variables),
            ("add_generation_prompt", request.HasField("add_generation_prompt")),
            ("continue_final_message", request.continue_final_message),
        ):
            if given:
                raise InvalidArgumentError(f"{name} goes with messages only", field=name)
    match request.WhichOneof("prompt"):
        case "text":
            add_special = request.add_special_tokens if request.HasField("add_special_tokens") else True
            return TextPrompt(request.text, request.suffix, add_special), _TEXT
        case "messages":
            turns: list[Turn] = []
            for message in request.messages.messages:
                turns.append(_turn_of(message))
                yield
            prompted = request.add_generation_prompt if request.HasField("add_generation_prompt") else None
            prompt = ChatPrompt(
                tuple(turns), tools, request.template_variables, prompted, request.continue_final_message
            )
            return prompt, _MESSAGES
        case "tokens":
            ids = request.tokens.ids
            tokens = gather(ids) if len(ids) <= MANY else (yield from gather_many(ids))
            return TokenPrompt(tokens), _TOKENS
        case _:
            raise InvalidArgumentError("no prompt: set text, messages or tokens", field="prompt")


def score_request_of(
    message: router_pb2.RouterScoreRequest, request_id: str, deadline: float, caller: Caller
) -> Steps[ScoreRequest]:
    """What a gRPC client wants scored.

    Raises:
        InvalidArgumentError: No prompt is set, or what goes with another kind of prompt is, or it has too many levels.
    """
    asked = router_pb2.RouterGenerateRequest(
        continue_final_message=message.continue_final_message, template_variables=message.template_variables
    )
    if message.HasField("add_special_tokens"):
        asked.add_special_tokens = message.add_special_tokens
    match message.WhichOneof("prompt"):
        case "text":
            asked.text = message.text
        case "messages":
            asked.messages.CopyFrom(message.messages)
        case "tokens":
            asked.tokens.CopyFrom(message.tokens)
    prompt, fields = yield from prompt_of(asked)
    yield
    return ScoreRequest(
        request_id=request_id,
        prompt=prompt,
        continuations=[_branch_of(each) for each in message.continuations],
        fields=fields,
        deadline=deadline,
        caller=caller,
        model=message.model if message.HasField("model") else None,
        lora=message.lora_name,
        unconditional=message.unconditional,
    )


def _branch_of(message: router_pb2.Continuation) -> Branch:
    """A continuation; messages are nested a hundred times at most."""
    return Branch(message.text, tuple(message.tokens.ids), tuple(map(_branch_of, message.next)))


def to_scores(found: Scores) -> router_pb2.RouterScoreResponse:
    """The answer to it."""
    return router_pb2.RouterScoreResponse(
        scores=[
            router_pb2.ContinuationScore(
                token_ids=path.token_ids, logprobs=path.logprobs, unconditional_logprobs=path.unconditional
            )
            for path in found.paths
        ],
        prompt_tokens=found.prompt_tokens,
        cached_tokens=found.cached_tokens,
        computed_tokens=found.computed_tokens,
        model=found.model,
    )


def truncation_of(request: router_pb2.RouterGenerateRequest) -> Truncation | None:
    """How its prompt is cut."""
    if not request.HasField("truncate_prompt_tokens"):
        return None
    return Truncation(request.truncate_prompt_tokens, request.truncate_right)


def tool_choice_of(request: router_pb2.RouterGenerateRequest) -> ToolChoice:
    """Which calls a request wants.

    Raises:
        InvalidArgumentError: There is no such choice; or a tool is named, but no call wanted; or calls are required and no tools
            given.
    """
    if request.tool_choice not in router_pb2.ToolChoice.values():
        raise InvalidArgumentError(f"there is no tool choice {request.tool_choice}", field="tool_choice")
    free = request.tool_choice in (router_pb2.TOOL_CHOICE_AUTO, router_pb2.TOOL_CHOICE_NONE)
    name = request.tool_choice_function
    if free and not name:
        return _FREE
    if name and free:
        raise InvalidArgumentError("a tool is named, but none has to be called", field="tool_choice_function")
    choice = ToolChoice(bool(name) or request.tool_choice == router_pb2.TOOL_CHOICE_REQUIRED, name)
    if choice.required and not request.tools:
        raise InvalidArgumentError("a call is required, but there are no tools", field="tools")
    return choice


def grammar_of(request: router_pb2.RouterGenerateRequest) -> AnswerGrammar | None:
    """What the text must match.

    Raises:
        InvalidArgumentError: The grammar is empty, or compiled already.
    """
    if not request.HasField("grammar"):
        return None
    source = to_grammar(request.grammar)
    if isinstance(source, bytes):
        raise InvalidArgumentError("grammar.compiled is taken from services only", field="grammar.compiled")
    return AnswerGrammar(source.kind, source.text, source.options.any_whitespace, source.options.lenient)


def _turn_of(message: common_pb2.ChatMessage) -> Turn:
    return Turn(
        role=message.role,
        content=message.content if message.HasField("content") else None,
        name=message.name if message.HasField("name") else None,
        tool_calls=tuple(ToolCall(call.id, call.name, call.arguments) for call in message.tool_calls),
        tool_call_id=message.tool_call_id if message.HasField("tool_call_id") else None,
        reasoning=message.reasoning if message.HasField("reasoning") else None,
        parts=tuple(message.parts),
        items=tuple(_item_of(item) for item in message.items),
    )


def _item_of(item: common_pb2.ContentPart) -> str | PictureSource:
    if not item.HasField("picture"):
        return item.text
    picture = item.picture
    return PictureSource(picture.url, picture.detail, picture.data, picture.video)


_POOLING_NAMES = {
    worker_pb2.POOLING_UNSPECIFIED: None,
    worker_pb2.POOLING_MEAN: "mean",
    worker_pb2.POOLING_LAST: "last",
    worker_pb2.POOLING_CLS: "cls",
}


def embed_request_of(
    message: router_pb2.RouterEmbedRequest, request_id: str, deadline: float, caller: Caller
) -> EmbedRequest:
    """What a gRPC client wants embedded.

    Raises:
        InvalidArgumentError: An input is neither text nor tokens, or there is no such pooling.
    """
    inputs: list[str | list[int]] = []
    names = []
    for index, item in enumerate(message.input):
        kind = item.WhichOneof("input")
        if kind is None:
            raise InvalidArgumentError("set text or tokens", field=f"input[{index}]")
        names.append(f"input[{index}].{kind}")
        inputs.append(item.text if kind == "text" else list(item.tokens.ids))
    if message.pooling not in _POOLING_NAMES:
        raise InvalidArgumentError(f"there is no pooling {message.pooling}", field="pooling")
    return EmbedRequest(
        request_id=request_id,
        inputs=inputs,
        names=names,
        model=message.model if message.HasField("model") else None,
        pooling=_POOLING_NAMES[message.pooling],
        normalize=message.normalize if message.HasField("normalize") else None,
        dimensions=message.dimensions if message.HasField("dimensions") else None,
        prompt_name=message.prompt_name if message.HasField("prompt_name") else None,
        lora=message.lora_name,
        max_tokens=message.truncate_prompt_tokens if message.HasField("truncate_prompt_tokens") else None,
        deadline=deadline,
        caller=caller,
    )


def classify_request_of(
    message: router_pb2.ClassifyRequest, request_id: str, deadline: float, caller: Caller
) -> EmbedRequest:
    """What a gRPC client wants classified.

    Raises:
        InvalidArgumentError: An input is neither text, tokens nor two texts.
    """
    inputs: list[str | list[int] | TextPair] = []
    names = []
    for index, item in enumerate(message.input):
        name = f"input[{index}]"
        match item.WhichOneof("input"):
            case "text":
                inputs.append(item.text)
                names.append(f"{name}.text")
            case "tokens":
                inputs.append(list(item.tokens.ids))
                names.append(f"{name}.tokens")
            case "pair":
                for part, text in (("first", item.pair.first), ("second", item.pair.second)):
                    if not text:
                        raise InvalidArgumentError("it is empty", field=f"{name}.pair.{part}")
                inputs.append(TextPair(item.pair.first, item.pair.second))
                names.append(f"{name}.pair.second")
            case _:
                raise InvalidArgumentError("set text, tokens or pair", field=name)
    return EmbedRequest(
        request_id=request_id,
        inputs=inputs,
        names=names,
        model=message.model if message.HasField("model") else None,
        max_tokens=message.truncate_prompt_tokens if message.HasField("truncate_prompt_tokens") else None,
        deadline=deadline,
        caller=caller,
        classifies=True,
        lora=message.lora_name,
    )


def to_classifications(found: Embeddings, *, raw: bool) -> router_pb2.ClassifyResponse:
    """The answer to it; ``raw``: the logits."""
    assert found.labels is not None
    made = found.vectors if raw else map(found.labels.scores, found.vectors)
    return router_pb2.ClassifyResponse(
        classifications=[router_pb2.Classification(scores=scores) for scores in made],
        labels=found.labels.names,
        prompt_tokens=found.prompt_tokens,
        model=found.model,
    )


def to_response(delta: Delta) -> router_pb2.RouterGenerateResponse:
    """What a client is sent for a delta."""
    output = delta.output
    response = router_pb2.RouterGenerateResponse(token_ids=delta.token_ids)
    if output.text:
        response.text = output.text
    if output.reasoning:
        response.reasoning = output.reasoning
    if delta.index:
        response.index = delta.index
    for item in delta.logprobs:
        response.logprobs.add(logprob=item.logprob, top_ids=item.top_ids, top_logprobs=item.top_logprobs)
    for call in output.tool_calls:
        response.tool_calls.add(index=call.index, id=call.id, name=call.name, arguments=call.arguments)
    if delta.finish is not None:
        response.finish_reason = _TO_PROTO[delta.finish.reason]
        response.usage.CopyFrom(to_usage(delta.finish.usage))
        if delta.finish.stop_match is not None:
            response.stop_match = delta.finish.stop_match
    return response


def to_usage(usage: Usage) -> common_pb2.Usage:
    """Token counts as a message."""
    return common_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        accepted_prediction_tokens=usage.accepted_prediction_tokens,
        rejected_prediction_tokens=usage.rejected_prediction_tokens,
        reasoning_tokens=usage.reasoning_tokens,
    )


def to_load(load: Load) -> worker_pb2.LoadReport:
    """A load as a message."""
    return worker_pb2.LoadReport(**structs.asdict(load))


def to_session(session: Session, workers: WorkerNames) -> router_pb2.SessionState:
    """The public description of a session."""
    return router_pb2.SessionState(
        id=session.session_id,
        model=session.model,
        tokens=len(session.tokens),
        pinned_tokens=session.pinned,
        worker=workers.id_of(session.worker),
        turns=session.turns,
        prompt_tokens=session.prompt_tokens,
        cached_tokens=session.cached_tokens,
        moves=session.moves,
        ttl_seconds=session.ttl,
        expires_in_seconds=max(0.0, session.expires - asyncio.get_running_loop().time()),
    )


def cache_hint_of(request: router_pb2.RouterGenerateRequest) -> CacheHint:
    """What is to become of the prompt in the cache.

    Raises:
        InvalidArgumentError: It makes no sense.
    """
    if not request.HasField("cache_hint"):
        return NO_HINT
    given = request.cache_hint
    hint = CacheHint(given.keep_seconds, given.demote, given.prefetch)
    hint.check()
    return hint
