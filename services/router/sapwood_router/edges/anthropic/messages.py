"""``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import msgspec

from sapwood_common.contract.seeds import Seeds
from sapwood_common.errors import SapwoodError
from sapwood_net.pacing.steps import Steps
from sapwood_router.edges.anthropic.conversation import prompt_of, tool_choice_of
from sapwood_router.edges.anthropic.errors import ThreadsError
from sapwood_router.edges.anthropic.types import (
    SIGNATURE,
    Block,
    CacheCreation,
    CountRequest,
    MessageResponse,
    MessagesRequest,
    TokenCount,
    Tool,
    Usage,
)
from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.edges.http.json_body import Neutral, convert, decode_object
from sapwood_router.edges.http.left_out import LeftOut
from sapwood_router.edges.http.sse import event
from sapwood_router.edges.openai.parameters import TEXT_SAMPLING, sampling_of
from sapwood_router.edges.sending import send_events, send_whole, with_resumptions
from sapwood_router.flow.generation import Pipeline
from sapwood_router.request.cache_hint import cache_hint_of
from sapwood_router.request.context import (
    AnswerGrammar,
    Delta,
    FieldNames,
    Finish,
    FinishReason,
    RequestContext,
    unique_id,
)
from sapwood_router.request.context import Usage as Counted
from sapwood_router.request.field_names import to_client_field
from sapwood_router.request.output import Output, OutputOptions
from sapwood_router.request.validation import check_prompt

IGNORED = frozenset({"service_tier", "inference_geo", "diagnostics"})
"""Never change an answer here."""
NEUTRAL: Neutral = {
    "container": (),
    "context_management": ({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    "mcp_servers": ([],),
    "output_format": (),
    "speed": ("standard",),
}
"""Parameters that are taken only with the values that ask for nothing."""
SPARED = frozenset({"context_management", "mcp_servers", "speed"})
"""Parameters that may be ignored: tools that Anthropic would run, and its cost-saving options."""


_KEEP_SECONDS = {"5m": 300.0, "1h": 3600.0}


async def create_message(exchange: Exchange, body: bytes, pipeline: Pipeline, deadline: float) -> None:
    """Answers a request.

    Raises:
        SapwoodError: It is wrong, or it failed.
    """
    given = decode_object(body)
    request = convert(
        given, MessagesRequest, NEUTRAL, IGNORED | TEXT_SAMPLING, left_out=exchange.left_out, spared=SPARED
    )
    exchange.accept_body_id(request)
    if request.thread is not None:
        raise ThreadsError("no threads are kept here: send the whole conversation without thread", field="thread")
    stream = request.stream is True
    deadline = deadline if stream else exchange.sooner(deadline)
    context = await exchange.in_turns(
        _context(request, given, exchange.request_id, deadline, pipeline.seeds, exchange.left_out)
    )
    context.caller = exchange.caller(request, _sessions(request))
    context.hint = cache_hint_of(request.cache_hint, {}, _keep_seconds(request))
    make = partial(_message, context)
    if not stream:
        await send_whole(exchange, context, pipeline, lambda output, finish: make(finish, _blocks(output)))
        return
    events = MessageEvents(
        lambda: make(None, []), lambda finish, called: make(finish, [{"type": "tool_use"}] if called else [])
    )
    await send_events(exchange, [context], pipeline, events)


async def count_tokens(exchange: Exchange, body: bytes, pipeline: Pipeline, deadline: float) -> None:
    """Answers a request: how many tokens the prompt of such a message has.

    Raises:
        SapwoodError: It is wrong, or it failed.
    """
    given = decode_object(body)
    request = convert(given, CountRequest, NEUTRAL, IGNORED, left_out=exchange.left_out, spared=SPARED)
    exchange.accept_body_id(request)
    deadline, salt = exchange.sooner(deadline), exchange.caller(request, {}).cache_salt
    tool_choice_of(request)
    prompt, paths = await exchange.in_turns(prompt_of(request, exchange.left_out))
    fields = _fields(paths)
    check_prompt(prompt, fields)
    exchange.on_disconnect(lambda: None)
    model = pipeline.registry.resolve(request.model)
    client, most_tokens = pipeline.tokenizers.of(model).client, partial(pipeline.registry.context_length, model)
    try:
        encoded = await client.encode_chat(prompt, exchange.request_id, deadline, salt, most_tokens=most_tokens)
    except SapwoodError as error:
        raise to_client_field(error, fields) from error
    await exchange.send_body(200, msgspec.json.encode(TokenCount(len(encoded.token_ids))))


def _context(
    request: MessagesRequest, given: dict[str, Any], request_id: str, deadline: float, seeds: Seeds, left_out: LeftOut
) -> Steps[RequestContext]:
    prompt, paths = yield from prompt_of(request, left_out)
    fields = _fields(paths)
    choice, parallel = tool_choice_of(request)
    return RequestContext(
        request_id=request_id,
        worker_request_id=unique_id(request_id),
        prompt=prompt,
        sampling=sampling_of(given, fields, seeds, max_tokens=request.max_tokens),
        output=OutputOptions(stop=tuple(request.stop_sequences or ())),
        fields=fields,
        deadline=deadline,
        model=request.model,
        whole=not request.stream,
        grammar=_grammar(request),
        tool_choice=choice,
        parallel_tool_calls=parallel,
    )


def _fields(turns: tuple[str, ...]) -> FieldNames:
    return FieldNames(
        prompt="messages",
        sampling="",
        max_tokens="max_tokens",
        grammar="output_config.format.schema",
        tool_name="tool_choice.name",
        template_variables="chat_template_kwargs",
        stop="stop_sequences",
        turns=turns,
        items="content",
        tool="",
        parameters="input_schema",
    )


def _grammar(request: MessagesRequest) -> AnswerGrammar | None:
    if request.output_config is None or request.output_config.format is None:
        return None
    return AnswerGrammar("json_schema", msgspec.json.encode(request.output_config.format.schema).decode())


def _sessions(request: MessagesRequest) -> dict[str, Any]:
    user = None if request.metadata is None else request.metadata.user_id
    return {"user": user} if user else {}


def _message(context: RequestContext, finish: Finish | None, content: list[dict[str, Any]]) -> MessageResponse:
    """The message with some content; without a finish it has just begun."""
    counted = (
        Counted(len(context.token_ids), 0, context.cached_tokens, written_tokens=context.written_tokens)
        if finish is None
        else finish.usage
    )
    called = any(block["type"] == "tool_use" for block in content)
    return MessageResponse(
        id=f"msg_{context.request_id}",
        model=context.public_model,
        content=content,
        stop_reason=None if finish is None else _stop_reason(finish, called),
        stop_sequence=None if finish is None else finish.stop_match,
        usage=_usage(counted, context.hint.keep_seconds),
    )


def _keep_seconds(request: MessagesRequest) -> float:
    """How long a request asks to keep its prompt: the longest of its marks, wherever they stand; 0: there is none."""
    blocks: list[Block | Tool] = [*(request.tools or ())]
    for content in (request.system, *(message.content for message in request.messages)):
        blocks += () if content is None or isinstance(content, str) else content
    marks = [request.cache_control, *(block.cache_control for block in blocks)]
    for block in blocks:
        if isinstance(block, Block) and isinstance(block.content, list):
            marks += [inner.cache_control for inner in block.content]
    return max((_KEEP_SECONDS[mark.ttl] for mark in marks if mark is not None), default=0.0)


def _usage(counted: Counted, keep_seconds: float) -> Usage:
    """Tokens that were kept before count as read, those that are kept now as created, the others as input."""
    read, created = counted.cached_tokens, counted.written_tokens
    made = Usage(counted.prompt_tokens - read - created, counted.completion_tokens, read, created)
    if keep_seconds:
        for_an_hour = keep_seconds >= _KEEP_SECONDS["1h"]
        made.cache_creation = CacheCreation(0, created) if for_an_hour else CacheCreation(created, 0)
    return made


def _stop_reason(finish: Finish, called: bool) -> str:
    if finish.reason is FinishReason.LENGTH:
        return "max_tokens"
    if finish.stop_match is not None:
        return "stop_sequence"
    return "tool_use" if called else "end_turn"


def _blocks(output: Output) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if output.reasoning:
        blocks.append({"type": "thinking", "thinking": output.reasoning, "signature": SIGNATURE})
    if output.text:
        blocks.append({"type": "text", "text": output.text})
    calls = output.tool_calls
    return blocks + [{"type": "tool_use", "id": c.id, "name": c.name, "input": _input(c.arguments)} for c in calls]


def _input(arguments: str) -> Any:
    """The arguments of a call, as an object; those that were cut short are shown as they came."""
    try:
        found = msgspec.json.decode(arguments or "{}")
    except msgspec.DecodeError:
        return {"arguments": arguments}
    return found if isinstance(found, dict) else {"arguments": arguments}


class MessageEvents:
    """Implements :class:`Events` of one message.

    Args:
        begun: Makes the message as it is before its first block.
        ended: Makes the message, without its content, as it is after its last one.
    """

    def __init__(self, begun: Callable[[], MessageResponse], ended: Callable[[Finish, bool], MessageResponse]) -> None:
        self._begun = begun
        self._ended = ended
        self._index = -1
        self._open: str | int | None = None
        """Which kind of block is open: text, thinking, or the call with this index."""
        self._called = False

    def begin(self) -> bytes:
        return event("message_start", message=self._begun()) + event("ping")

    def more(self, delta: Delta) -> bytes:
        output, written = delta.output, b""
        if output.reasoning:
            written += self._change("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            written += self._delta({"type": "thinking_delta", "thinking": output.reasoning})
        later = []
        for call in output.tool_calls:
            if call.index == self._open:  # the rest of a call comes before the text after it
                written += self._delta({"type": "input_json_delta", "partial_json": call.arguments})
            else:
                later.append(call)
        if output.text:
            written += self._change("text", {"type": "text", "text": ""})
            written += self._delta({"type": "text_delta", "text": output.text})
        for call in later:
            self._called = True
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            written += self._change(call.index, block)
            if call.arguments:
                written += self._delta({"type": "input_json_delta", "partial_json": call.arguments})
        return written

    def end(self, finish: Finish, resumptions: int) -> Iterable[bytes]:
        message = self._ended(finish, self._called)
        delta = {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}
        last = event("message_delta", delta=delta, usage=message.usage) + event("message_stop")
        return (self._close() + with_resumptions(last, resumptions),)

    def _change(self, kind: str | int, block: dict[str, Any]) -> bytes:
        if kind == self._open:
            return b""
        closed = self._close()
        self._open = kind
        self._index += 1
        return closed + event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        signed = self._delta({"type": "signature_delta", "signature": SIGNATURE}) if self._open == "thinking" else b""
        self._open = None
        return signed + event("content_block_stop", index=self._index)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return event("content_block_delta", index=self._index, delta=delta)
