"""``POST /v2/chat``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from sapwood_common import errors
from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.contract.seeds import Seeds
from sapwood_common.errors import InvalidArgumentError
from sapwood_router.edges.cohere.types import (
    CohereAnswer,
    CohereChatRequest,
    CohereEmbeddings,
    CohereEmbedRequest,
    CohereMessage,
    CoherePart,
)
from sapwood_router.edges.http.errors import http_status
from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.edges.http.json_body import Neutral, convert, decode_object
from sapwood_router.edges.http.sse import event
from sapwood_router.edges.openai.embeddings import base64_of
from sapwood_router.edges.openai.parameters import TEXT_SAMPLING, sampling_of
from sapwood_router.edges.openai.tools import tools_of
from sapwood_router.edges.openai.types import ChatRequest
from sapwood_router.edges.sending import send_events, send_whole, with_resumptions
from sapwood_router.flow.generation import Pipeline
from sapwood_router.request.arguments import arguments_text
from sapwood_router.request.context import (
    AnswerGrammar,
    ChatPrompt,
    Delta,
    FieldNames,
    Finish,
    FinishReason,
    RequestContext,
    ToolCall,
    ToolChoice,
    Turn,
    Usage,
    unique_id,
)
from sapwood_router.request.embed_request import EmbedRequest
from sapwood_router.request.output import Output, OutputOptions, ToolCallDelta

NEUTRAL: Neutral = {"documents": ([],), "logprobs": (False,)}
"""Parameters that are taken only with the values that ask for nothing."""
IGNORED = frozenset({"safety_mode", "citation_options"})
"""Never change an answer here."""
_RENAMED = {"k": "top_k", "p": "top_p"}
_FIELDS = FieldNames(
    prompt="messages",
    sampling="",
    max_tokens="max_tokens",
    call="function.",
    reasoning="tool_plan",
    grammar="response_format.json_schema",
    template_variables="thinking",
    stop="stop_sequences",
)


async def chat(exchange: Exchange, body: bytes, pipeline: Pipeline, deadline: float) -> None:
    """Answers a conversation.

    Raises:
        SapwoodError: It is wrong, or it failed.
    """
    given = decode_object(body)
    request = convert(given, CohereChatRequest, NEUTRAL, IGNORED | TEXT_SAMPLING, left_out=exchange.left_out)
    exchange.accept_body_id(request)
    stream = request.stream is True
    tools = tools_of(ChatRequest(messages=[], tools=request.tools), _strict(request, given), exchange.left_out)
    if request.tool_choice == "REQUIRED" and not tools:
        raise InvalidArgumentError("tool_choice is only allowed with tools", field="tool_choice")
    turns = tuple(_turn(message, f"messages[{index}]") for index, message in enumerate(request.messages))
    context = RequestContext(
        request_id=exchange.request_id,
        worker_request_id=unique_id(exchange.request_id),
        prompt=ChatPrompt(turns, "" if request.tool_choice == "NONE" else tools, _variables(request)),
        sampling=_sampling(request, given, pipeline.seeds),
        output=OutputOptions(stop=tuple(request.stop_sequences or ())),
        fields=_FIELDS,
        deadline=deadline if stream else exchange.sooner(deadline),
        model=request.model,
        whole=not stream,
        grammar=_grammar(request),
        tool_choice=ToolChoice(required=request.tool_choice == "REQUIRED"),
        caller=exchange.caller(request, given),
    )
    if stream:
        await send_events(exchange, [context], pipeline, _ChatEvents(context))
        return
    await send_whole(exchange, context, pipeline, lambda output, finish: _answer(context, output, finish))


def _strict(request: CohereChatRequest, given: dict[str, Any]) -> Any:
    """The tools as they came, each of them strict where the request says so."""
    tools = given.get("tools")
    if not request.strict_tools or not tools:
        return tools
    return [
        {**tool, "function": {**tool["function"], "strict": True}} if tool.get("function") else tool for tool in tools
    ]


def _sampling(request: CohereChatRequest, given: dict[str, Any], seeds: Seeds) -> SamplingParams:
    own = {ours: given[theirs] for theirs, ours in _RENAMED.items() if given.get(theirs) is not None}
    try:
        return sampling_of(given, _FIELDS, seeds, max_tokens=request.max_tokens, **own)
    except InvalidArgumentError as error:
        for theirs, ours in _RENAMED.items():
            if theirs in given and error.field == ours:
                raise InvalidArgumentError(error.message.removeprefix("top_"), field=theirs) from error
        raise


def _grammar(request: CohereChatRequest) -> AnswerGrammar | None:
    form = request.response_format
    if form is None or form.type == "text":
        return None
    schema = form.json_schema or form.schema or {"type": "object"}
    return AnswerGrammar("json_schema", msgspec.json.encode(schema).decode(), lenient=True)


def _variables(request: CohereChatRequest) -> str:
    if request.thinking is None:
        return ""
    thinks = request.thinking.type == "enabled"
    return msgspec.json.encode({"enable_thinking": thinks, "thinking": thinks}).decode()


def _turn(message: CohereMessage, path: str) -> Turn:
    if message.role == "tool" and not message.tool_call_id:
        raise InvalidArgumentError("tool_call_id is required: the call that this answers", field=f"{path}.tool_call_id")
    parts = message.content
    thoughts = [] if parts is None or isinstance(parts, str) else [part.thinking or "" for part in parts]
    reasoning = message.tool_plan or "".join(thoughts) or None
    calls = tuple(
        ToolCall(call.id, call.function.name, arguments_text(call.function.arguments))
        for call in message.tool_calls or ()
        if call.function is not None
    )
    content = parts if parts is None or isinstance(parts, str) else _text(parts, f"{path}.content")
    if content is None and message.role != "assistant":
        raise InvalidArgumentError("content is required", field=f"{path}.content")
    return Turn(
        message.role,
        content or (None if calls else ""),
        tool_calls=calls,
        tool_call_id=message.tool_call_id or None,
        reasoning=reasoning if message.role == "assistant" else None,
    )


def _text(parts: list[CoherePart], path: str) -> str:
    texts: list[str] = []
    for index, part in enumerate(parts):
        if part.type == "text":
            texts.append(part.text or "")
        elif part.type == "document" and part.document is not None:
            data = part.document.get("data")
            texts.append(data if isinstance(data, str) else msgspec.json.encode(data).decode())
        elif part.type != "thinking":
            raise InvalidArgumentError(f"content of type {part.type!r} is not supported", field=f"{path}[{index}].type")
    return "\n".join(texts)


def _answer(context: RequestContext, output: Output, finish: Finish) -> CohereAnswer:
    message: dict[str, Any] = {"role": "assistant"}
    content = [{"type": "thinking", "thinking": output.reasoning}] if output.reasoning else []
    if output.text or not output.tool_calls:
        content.append({"type": "text", "text": output.text})
    if content:
        message["content"] = content
    if output.tool_calls:
        message["tool_calls"] = [_call(call, call.arguments) for call in output.tool_calls]
    return CohereAnswer(
        id=context.request_id,
        finish_reason=_reason(finish, called=bool(output.tool_calls)),
        message=message,
        usage=_usage(finish.usage),
    )


def _call(call: ToolCallDelta, arguments: str) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _reason(finish: Finish, *, called: bool) -> str:
    if finish.reason is FinishReason.LENGTH:
        return "MAX_TOKENS"
    if finish.stop_match is not None:
        return "STOP_SEQUENCE"
    return "TOOL_CALL" if called else "COMPLETE"


def _usage(usage: Usage) -> dict[str, Any]:
    counts = {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens}
    return {"billed_units": counts, "tokens": counts, "cached_tokens": usage.cached_tokens}


class _ChatEvents:
    """Implements :class:`Events`: each piece of content, and each call, is started, filled and ended before the next."""

    def __init__(self, context: RequestContext) -> None:
        self._context = context
        self._open: str | int | None = None
        """Which kind of content is open, or the call with this index."""
        self._contents = 0
        self._called = False

    def begin(self) -> bytes:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": [],
            "tool_plan": "",
            "tool_calls": [],
            "citations": [],
        }
        return event("message-start", id=self._context.request_id, delta={"message": message})

    def more(self, delta: Delta) -> bytes:
        output, written = delta.output, b""
        if output.reasoning:
            written += self._content("thinking", output.reasoning)
        later: list[ToolCallDelta] = []
        for call in output.tool_calls:
            if call.index == self._open:  # the rest of a call comes before the text after it
                written += self._arguments(call)
            else:
                later.append(call)
        if output.text:
            written += self._content("text", output.text)
        for call in later:
            self._called = True
            written += self._close()
            self._open = call.index
            change = {"message": {"tool_calls": _call(call, "")}}
            written += event("tool-call-start", index=call.index, delta=change) + self._arguments(call)
        return written

    def end(self, finish: Finish, resumptions: int) -> Iterable[bytes]:
        delta = {"finish_reason": _reason(finish, called=self._called), "usage": _usage(finish.usage)}
        last = with_resumptions(event("message-end", id=self._context.request_id, delta=delta), resumptions)
        return (self._close() + last + b"data: [DONE]\n\n",)

    def _content(self, kind: str, text: str) -> bytes:
        written = b""
        if self._open != kind:
            written = self._close()
            self._open = kind
            change = {"message": {"content": {"type": kind, kind: ""}}}
            written += event("content-start", index=self._contents, delta=change)
        return written + event("content-delta", index=self._contents, delta={"message": {"content": {kind: text}}})

    def _arguments(self, call: ToolCallDelta) -> bytes:
        if not call.arguments:
            return b""
        change = {"message": {"tool_calls": {"function": {"arguments": call.arguments}}}}
        return event("tool-call-delta", index=call.index, delta=change)

    def _close(self) -> bytes:
        opened, self._open = self._open, None
        if opened is None:
            return b""
        if isinstance(opened, int):
            return event("tool-call-end", index=opened)
        self._contents += 1
        return event("content-end", index=self._contents - 1)


EMBED_NEUTRAL: Neutral = {"images": ([],)}
EMBED_IGNORED = frozenset({"priority"})
_TYPES = ("float", "base64")


async def embed(exchange: Exchange, body: bytes, pipeline: Pipeline, deadline: float) -> None:
    """Answers with the vectors of texts. ``input_type`` is not shown to the model: a prefix is the client's to write.

    Raises:
        SapwoodError: It is wrong, or it failed.
    """
    given = decode_object(body)
    request = convert(given, CohereEmbedRequest, EMBED_NEUTRAL, EMBED_IGNORED, left_out=exchange.left_out)
    exchange.accept_body_id(request)
    if request.truncate == "START":
        raise InvalidArgumentError("inputs to embed are cut at their end", field="truncate")
    kinds = request.embedding_types or ["float"]
    if unknown := next((kind for kind in kinds if kind not in _TYPES), None):
        raise InvalidArgumentError(f"embeddings of type {unknown!r} are not made", field="embedding_types")
    texts, names = _texts(request)
    whole = request.truncate == "NONE"
    wanted = EmbedRequest(
        request_id=exchange.request_id,
        inputs=texts,
        names=names,
        model=request.model,
        normalize=True,
        dimensions=request.output_dimension,
        max_tokens=None if whole else request.max_tokens or -1,
        deadline=exchange.sooner(deadline),
        caller=exchange.caller(request, given),
    )
    exchange.on_disconnect(lambda: None)
    found = await pipeline.embedder.embed(wanted)
    made: dict[str, list[Any]] = {}
    for kind in dict.fromkeys(kinds):
        made[kind] = [base64_of(vector) if kind == "base64" else list(vector) for vector in found.vectors]
    counts = {"input_tokens": found.prompt_tokens}
    answer = CohereEmbeddings(
        id=exchange.request_id,
        embeddings=made,
        texts=texts,
        meta={"api_version": {"version": "2"}, "billed_units": counts, "tokens": counts},
    )
    await exchange.send_body(200, msgspec.json.encode(answer))


def _texts(request: CohereEmbedRequest) -> tuple[list[str], list[str]]:
    """The texts, and the client's name of each."""
    if request.texts:
        return request.texts, [f"texts[{index}]" for index in range(len(request.texts))]
    texts: list[str] = []
    for index, item in enumerate(request.inputs or ()):
        parts: list[str] = []
        for number, part in enumerate(item.content or ()):
            if part.type != "text" or part.text is None:
                raise InvalidArgumentError("only text is embedded", field=f"inputs[{index}].content[{number}]")
            parts.append(part.text)
        texts.append("\n".join(parts))
    if not texts:
        raise InvalidArgumentError("texts is required", field="texts")
    return texts, [f"inputs[{index}]" for index in range(len(texts))]


class CohereError(msgspec.Struct):
    """What tells an error."""

    message: str
    id: str


class CohereDialect:
    """Implements :class:`Dialect`: the message begins with the field at fault."""

    shape: type[msgspec.Struct] = CohereError
    id_header: bytes | None = None

    def status(self, error: errors.SapwoodError) -> int:
        return http_status(error)

    def body(self, error: errors.SapwoodError, request_id: str) -> bytes:
        return msgspec.json.encode(CohereError(_sentence(error), request_id))

    def event(self, error: errors.SapwoodError, request_id: str) -> bytes:
        return event("message-end", id=request_id, delta={"error": _sentence(error), "finish_reason": "ERROR"})


def _sentence(error: errors.SapwoodError) -> str:
    named = error.field and error.field not in error.message
    return f"{error.field}: {error.message}" if named else error.message
