"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from sapwood_common.contract.sampling import MOST_LOGPROBS
from sapwood_common.contract.seeds import RANDOM_SEEDS, Seeds
from sapwood_common.errors import InvalidArgumentError
from sapwood_net.pacing.steps import Steps
from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.edges.http.json_body import convert, decode_object
from sapwood_router.edges.http.left_out import LeftOut
from sapwood_router.edges.openai.annotate import Annotator
from sapwood_router.edges.openai.answer import Answer, finish_reason, send_answer, usage_object
from sapwood_router.edges.openai.logprobs import ChatWriter
from sapwood_router.edges.openai.other_parameters import CHAT_NEUTRAL, CHAT_SPARED
from sapwood_router.edges.openai.parameters import (
    BESIDE,
    StreamWish,
    effort_variables,
    output_of,
    sampling_of,
    stream_wish,
    thinking_variables,
    token_name,
    truncation_of,
)
from sapwood_router.edges.openai.response_format import answer_grammar
from sapwood_router.edges.openai.sse import ChatChunks, ChatTokenChunks
from sapwood_router.edges.openai.tools import tool_choice_of, tools_of
from sapwood_router.edges.openai.types import (
    AnswerMessage,
    CalledFunction,
    ChatChoice,
    ChatRequest,
    ChatResponse,
    ContentPart,
    Message,
    ToolCallObject,
    stop_reason,
)
from sapwood_router.flow.generation import Pipeline
from sapwood_router.request.arguments import arguments_text
from sapwood_router.request.cache_hint import cache_hint_of
from sapwood_router.request.context import (
    BETWEEN_PARTS,
    ChatPrompt,
    FieldNames,
    PictureSource,
    RequestContext,
    ToolCall,
    Turn,
    unique_id,
)
from sapwood_router.request.validation import continuations

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Roles that are taken; OpenAI renamed system to developer for its newer models."""

CHAT_FIELDS = FieldNames(
    prompt="messages",
    sampling="",
    max_tokens="max_tokens",
    call="function.",
    reasoning="reasoning_content",
    tool_name="tool_choice.function.name",
    template_variables="chat_template_kwargs",
    lora="lora_path",
    items="content",
)
"""How clients of chats spell the fields of errors."""


async def chat(exchange: Exchange, body: bytes, pipeline: Pipeline, deadline: float) -> None:
    """Answers a request.

    Raises:
        SapwoodError: It is wrong, or it failed.
    """
    given = decode_object(body)
    del body
    request = convert(given, ChatRequest, CHAT_NEUTRAL, BESIDE, left_out=exchange.left_out, spared=CHAT_SPARED)
    wish = stream_wish(request, exchange.left_out)
    stream = wish is not StreamWish.WHOLE
    deadline = deadline if stream else exchange.sooner(deadline)
    exchange.accept_body_id(request)
    left_out = exchange.left_out
    contexts = await exchange.in_turns(
        contexts_of(request, given, exchange.request_id, deadline, left_out, pipeline.seeds)
    )
    caller, hint = exchange.caller(request, given), cache_hint_of(request.cache_hint, given)
    for context in contexts:
        context.caller, context.hint = caller, hint
    answer_id, created = f"chatcmpl-{exchange.request_id}", int(time.time())
    writer = partial(ChatWriter, token_name(request)) if request.logprobs else None
    tells_prompt = contexts[0].sampling.prompt_logprobs is not None
    stint = pipeline.heavy.stint(caller.tenant)
    annotator = Annotator(contexts, pipeline.tokenizers.of(request.model), writer, stint, tells_prompt=tells_prompt)
    shows_ids, hides_reasoning = request.return_token_ids is True, request.include_reasoning is False

    async def make_body(answers: list[Answer]) -> ChatResponse:
        return ChatResponse(
            id=answer_id,
            created=created,
            model=contexts[0].public_model,
            choices=[_choice(answer, shows_ids, hides_reasoning) for answer in answers],
            usage=usage_object([answer.finish.usage for answer in answers], len(contexts)),
            prompt_token_ids=list(contexts[0].token_ids) if shows_ids else msgspec.UNSET,
            prompt_logprobs=await annotator.prompt_logprobs(0),
        )

    chunks = ChatTokenChunks if shows_ids else ChatChunks
    events = chunks(answer_id, contexts, wish, annotator, hides_reasoning=hides_reasoning) if stream else None
    await send_answer(exchange, pipeline, contexts, annotator, make_body, events)


def _choice(answer: Answer, shows_ids: bool, hides_reasoning: bool) -> ChatChoice:
    output = answer.output
    message = AnswerMessage(output.text)
    if output.reasoning and not hides_reasoning:
        message.reasoning_content = message.reasoning = output.reasoning
    if output.tool_calls:
        message.content = output.text or None
        message.tool_calls = [
            ToolCallObject(call.id, CalledFunction(call.name, call.arguments)) for call in output.tool_calls
        ]
    reason = finish_reason(answer.finish, bool(output.tool_calls))
    ids = answer.token_ids if shows_ids else msgspec.UNSET
    return ChatChoice(answer.index, message, reason, answer.logprobs, ids, stop_reason(answer.finish))


def contexts_of(
    request: ChatRequest,
    given: dict[str, Any],
    request_id: str,
    deadline: float,
    left_out: LeftOut,
    seeds: Seeds = RANDOM_SEEDS,
) -> Steps[list[RequestContext]]:
    """The pipeline's requests for a checked request (``given`` is the original): one for each continuation.
    ``seeds`` draws an absent seed; ``left_out`` takes tools that nothing here runs.

    Raises:
        InvalidArgumentError: A field makes no sense.
    """
    if request.max_tokens is not None and request.max_completion_tokens is not None:
        raise InvalidArgumentError("set max_completion_tokens or max_tokens, not both", field="max_tokens")
    newer = request.max_completion_tokens is not None
    max_tokens = request.max_completion_tokens if newer else request.max_tokens
    grammar, grammar_field = answer_grammar(request)
    max_name = "max_completion_tokens" if newer else "max_tokens"
    fields = replace(CHAT_FIELDS, max_tokens=max_name, grammar=grammar_field)
    count = 1 if request.n is None else request.n
    prompt = yield from chat_prompt(request, given.get("tools"), left_out)
    sampling = sampling_of(given, fields, seeds, max_tokens=max_tokens, logprobs=_logprobs(request))
    choice = tool_choice_of(request, left_out)
    return [
        RequestContext(
            request_id=request_id,
            worker_request_id=unique_id(request_id),
            prompt=prompt,
            sampling=own,
            output=output_of(request),
            fields=fields,
            deadline=deadline,
            model=request.model,
            lora=request.lora_path or "",
            truncation=truncation_of(request),
            bad_words=tuple(word.lstrip() for word in request.bad_words or ()),
            whole=not request.stream,
            grammar=grammar,
            tool_choice=choice,
            parallel_tool_calls=request.parallel_tool_calls is not False,
        )
        for own in continuations(sampling, count, fields)
    ]


def chat_prompt(request: ChatRequest, tools: Any, left_out: LeftOut) -> Steps[ChatPrompt]:
    """The conversation as the tokenizer takes it.

    Args:
        request: The checked request.
        tools: Its ``tools`` as they came.
        left_out: Takes tools that nothing here runs.

    Raises:
        InvalidArgumentError: A message or a tool is none.
    """
    turns: list[Turn] = []
    for index, message in enumerate(request.messages):
        turns.append(_turn(message, f"messages[{index}]", left_out))
        yield
    offered = tools_of(request, tools, left_out)
    yield
    variables = _template_variables(request)
    yield
    return ChatPrompt(
        tuple(turns),
        offered,
        variables,
        request.add_generation_prompt,
        request.continue_final_message is True,
    )


def _template_variables(request: ChatRequest) -> str:
    """``chat_template_kwargs``, before them what OpenAI's parameters mean to templates."""
    variables: dict[str, Any] = {}
    if request.reasoning_effort is not None:
        variables = effort_variables(request.reasoning_effort)
    if request.verbosity is not None:
        variables["verbosity"] = request.verbosity
    variables |= thinking_variables(request)
    variables |= request.chat_template_kwargs or {}
    return msgspec.json.encode(variables).decode() if variables else ""


def _logprobs(request: ChatRequest) -> int | None:
    top = request.top_logprobs
    if top is not None and not 0 <= top <= MOST_LOGPROBS:
        raise InvalidArgumentError(f"top_logprobs must be in 0..{MOST_LOGPROBS}, got {top}", field="top_logprobs")
    if not request.logprobs:
        if top:
            raise InvalidArgumentError("top_logprobs is only allowed with logprobs", field="top_logprobs")
        return None
    return top or 0


def _turn(message: Message, path: str, left_out: LeftOut) -> Turn:
    role = _ROLES.get(message.role)
    if role is None:
        raise InvalidArgumentError(
            f"role {message.role!r} is not supported; there are {', '.join(_ROLES)}", field=f"{path}.role"
        )
    for name, given, belongs in (
        ("tool_calls", message.tool_calls, role == "assistant"),
        ("reasoning_content", message.reasoning_content, role == "assistant"),
        ("tool_call_id", message.tool_call_id, role == "tool"),
        ("function_call", message.function_call, False),
        ("audio", message.audio, False),
        ("refusal", message.refusal, False),
    ):
        if given and not belongs:
            raise InvalidArgumentError(
                f"{name} is not supported in a message of role {message.role!r}", field=f"{path}.{name}"
            )
    if role == "tool" and not message.tool_call_id:
        raise InvalidArgumentError("tool_call_id is required: the call that this answers", field=f"{path}.tool_call_id")
    content = _content(message, path)
    items = content if isinstance(content, list) else []
    texts = [item for item in items if isinstance(item, str)]
    return Turn(
        role=role,
        content=content if content is None or isinstance(content, str) else BETWEEN_PARTS.join(texts),
        name=message.name,
        tool_calls=_calls(message, path, left_out),
        tool_call_id=message.tool_call_id or None,
        reasoning=_reasoning(message) if role == "assistant" else None,
        parts=tuple(texts) if len(texts) > 1 else (),
        items=tuple(items) if len(items) > len(texts) else (),
    )


def _calls(message: Message, path: str, left_out: LeftOut) -> tuple[ToolCall, ...]:
    """The calls of functions in a message; those of tools that nothing here runs are left out."""
    calls: list[ToolCall] = []
    for index, call in enumerate(message.tool_calls or ()):
        where = f"{path}.tool_calls[{index}]"
        if call.type != "function":
            left_out.value(f"{where}.type", call.type, f"calls of type {call.type!r} are not supported")
        elif call.function is None:
            raise InvalidArgumentError(f"{where}.function is required", field=f"{where}.function")
        else:
            calls.append(ToolCall(call.id, call.function.name, arguments_text(call.function.arguments)))
    return tuple(calls)


def _reasoning(message: Message) -> str | None:
    """The assistant's reasoning, by either of its names."""
    other = message.reasoning if isinstance(message.reasoning, str) else None
    return message.reasoning_content or other or None


def _content(message: Message, path: str) -> str | list[str | PictureSource] | None:
    """The text of a message, or its texts and pictures."""
    if message.content is None:
        if message.role == "assistant":  # it called tools, or said nothing: clients send back what they got
            return None
        raise InvalidArgumentError("content is required", field=f"{path}.content")
    if isinstance(message.content, str):
        return message.content
    items: list[str | PictureSource] = []
    for index, part in enumerate(message.content):
        field = f"{path}.content[{index}]"
        if part.type in ("image_url", "video_url"):
            items.append(_picture(part, message.role, field))
            continue
        if part.type != "text":
            raise InvalidArgumentError(
                f"content of type {part.type!r} is not supported; there are text, image_url and video_url",
                field=f"{field}.type",
            )
        if part.text is None:
            raise InvalidArgumentError("text is required", field=f"{field}.text")
        items.append(part.text)
    return items


def _picture(part: ContentPart, role: str, field: str) -> PictureSource:
    video = part.type == "video_url"
    if role not in ("user", "tool"):
        what = "video" if video else "picture"
        raise InvalidArgumentError(f"a {what} is not supported in a message of role {role!r}", field=f"{field}.type")
    given = part.video_url if video else part.image_url
    if given is None:
        raise InvalidArgumentError(f"{part.type} is required", field=f"{field}.{part.type}")
    if isinstance(given, str):
        return PictureSource(given, video=video)
    return PictureSource(given.url, given.detail or "", video=video)
