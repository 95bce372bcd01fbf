"""``POST /api/chat`` and ``POST /api/generate``: an answer as lines of JSON, or as one."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec.structs import replace

from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.contract.seeds import Seeds
from sapwood_common.errors import InvalidArgumentError
from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.edges.http.json_body import convert, decode_object
from sapwood_router.edges.http.left_out import LeftOut
from sapwood_router.edges.ollama.models import named
from sapwood_router.edges.ollama.types import (
    OllamaAnswer,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaRequest,
)
from sapwood_router.edges.openai.parameters import TEXT_SAMPLING, effort_variables, sampling_of
from sapwood_router.edges.openai.tools import tools_of
from sapwood_router.edges.openai.types import ChatRequest
from sapwood_router.edges.sending import send_events, send_whole, with_resumptions
from sapwood_router.flow.generation import Pipeline
from sapwood_router.request.arguments import arguments_text, whole_arguments
from sapwood_router.request.context import (
    AnswerGrammar,
    ChatPrompt,
    Delta,
    FieldNames,
    Finish,
    PictureSource,
    Prompt,
    RequestContext,
    TextPrompt,
    ToolCall,
    Turn,
    picture_file,
    unique_id,
)
from sapwood_router.request.output import Output, OutputOptions, ToolCallDelta

LINES = (
    (b"content-type", b"application/x-ndjson"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
IGNORED = frozenset({"keep_alive"})
"""Never changes an answer here."""
_ROLES = frozenset({"system", "user", "assistant", "tool"})


async def chat(exchange: Exchange, body: bytes, pipeline: Pipeline, deadline: float) -> None:
    """Answers a conversation.

    Raises:
        SapwoodError: It is wrong, or it failed.
    """
    given = decode_object(body)
    request = convert(given, OllamaChatRequest, {}, IGNORED, left_out=exchange.left_out)
    if not request.messages:
        await _say_loaded(exchange, request, pipeline, is_chat=True)
        return
    tools = tools_of(ChatRequest(messages=[], tools=request.tools), given.get("tools"), exchange.left_out)
    prompt = ChatPrompt(_turns(request.messages), tools, template_variables(request))
    await _answer(exchange, request, prompt, "messages", pipeline, deadline, is_chat=True)


async def generate(exchange: Exchange, body: bytes, pipeline: Pipeline, deadline: float) -> None:
    """Continues a text: unchanged with ``raw``, else as the user's message in the model's chat template.

    Raises:
        SapwoodError: It is wrong, or it failed.
    """
    given = decode_object(body)
    request = convert(given, OllamaGenerateRequest, {}, IGNORED, left_out=exchange.left_out)
    pictures = _pictures(request.images, "images")
    if pictures and (request.raw or request.suffix):
        raise InvalidArgumentError("images are not supported with raw or suffix", field="images")
    if not request.prompt and not request.suffix:
        await _say_loaded(exchange, request, pipeline, is_chat=False)
        return
    text = request.prompt or ""
    prompt: Prompt = TextPrompt(text, request.suffix or "")
    if not request.raw and not request.suffix:
        system = (Turn("system", request.system),) if request.system else ()
        prompt = ChatPrompt((*system, _with_pictures(Turn("user", text), pictures)), "", template_variables(request))
    await _answer(exchange, request, prompt, "prompt", pipeline, deadline, is_chat=False)


async def _answer(
    exchange: Exchange,
    request: OllamaRequest,
    prompt: Prompt,
    field: str,
    pipeline: Pipeline,
    deadline: float,
    *,
    is_chat: bool,
) -> None:
    exchange.accept_body_id(request)
    fields, streams = fields_of(field), request.stream is not False
    sampling, output = settings_of(request.options, fields, pipeline.seeds, exchange.left_out)
    context = RequestContext(
        request_id=exchange.request_id,
        worker_request_id=unique_id(exchange.request_id),
        prompt=prompt,
        sampling=sampling,
        output=output,
        fields=fields,
        deadline=deadline,
        model=named(pipeline, request.model),
        whole=not streams,
        grammar=grammar_of(request),
        caller=exchange.caller(request, {}),
    )
    if streams:
        exchange.stream_headers = LINES
        await send_events(exchange, [context], pipeline, _Lines(context, is_chat=is_chat))
        return

    def whole(output: Output, finish: Finish) -> OllamaAnswer:
        made = _line(context, output, output.tool_calls, is_chat=is_chat)
        return _ended(made, context, finish)

    await send_whole(exchange, context, pipeline, whole)


async def _say_loaded(exchange: Exchange, request: OllamaRequest, pipeline: Pipeline, *, is_chat: bool) -> None:
    """The answer to a request without a prompt, by which clients have a model loaded: here it is."""
    model = pipeline.registry.resolve_any(named(pipeline, request.model))
    made = OllamaAnswer(model=model, created_at=_now(), done=True, done_reason="load")
    if is_chat:
        made.message = {"role": "assistant", "content": ""}
    else:
        made.response = ""
    await exchange.send_body(200, msgspec.json.encode(made))


def _turns(messages: list[OllamaMessage]) -> tuple[Turn, ...]:
    """The conversation. Results of tools name the tool, not the call: they answer the calls in order."""
    turns: list[Turn] = []
    unanswered = _Unanswered(())
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        if message.role not in _ROLES:
            raise InvalidArgumentError(f"role {message.role!r} is not supported", field=f"{path}.role")
        pictures = _pictures(message.images, f"{path}.images")
        if pictures and message.role not in ("user", "tool"):
            raise InvalidArgumentError(
                f"images are not supported in a message of role {message.role!r}", field=f"{path}.images"
            )
        if message.role == "tool":
            call = unanswered.take(message.tool_name)
            call_id = message.tool_call_id or (f"call_{index}" if call is None else call.id)
            name = message.tool_name or (None if call is None else call.name)
            turn = Turn("tool", message.content or "", name=name, tool_call_id=call_id)
            turns.append(_with_pictures(turn, pictures))
            continue
        calls = tuple(
            ToolCall(call.id or f"call_{index}_{number}", call.function.name, arguments_text(call.function.arguments))
            for number, call in enumerate(message.tool_calls or ())
        )
        unanswered = _Unanswered(calls) if message.role == "assistant" else unanswered
        content = message.content or (None if calls else "")
        turn = Turn(message.role, content, tool_calls=calls, reasoning=message.thinking or None)
        turns.append(_with_pictures(turn, pictures))
    return tuple(turns)


def _pictures(images: list[Any] | None, field: str) -> list[PictureSource]:
    """Files as base64."""
    if any(not isinstance(image, str) for image in images or ()):
        raise InvalidArgumentError("an image is base64", field=field)
    return [picture_file(image, f"{field}[{index}]") for index, image in enumerate(images or ())]


def _with_pictures(turn: Turn, pictures: list[PictureSource]) -> Turn:
    """A turn that shows pictures before what it says."""
    return replace(turn, items=(*pictures, turn.content or "")) if pictures else turn


class _Unanswered:
    """The calls of a message that have no result yet. To take one costs O(1) on average: there may be thousands of both."""

    def __init__(self, calls: Iterable[ToolCall]) -> None:
        self._calls = deque(enumerate(calls))
        self._by_name: dict[str, deque[tuple[int, ToolCall]]] = {}
        for each in self._calls:
            self._by_name.setdefault(each[1].name, deque()).append(each)
        self._taken: set[int] = set()

    def take(self, name: str | None) -> ToolCall | None:
        """The first call of a tool, or of any where no name is given; None: there is none."""
        queue = self._calls if name is None else self._by_name.get(name)
        while queue:
            number, call = queue.popleft()
            if number not in self._taken:
                self._taken.add(number)
                return call
        return None


class _Lines:
    """Implements :class:`Events`: a line for each piece of output, a call in one piece once all of it is there."""

    def __init__(self, context: RequestContext, *, is_chat: bool) -> None:
        self._context = context
        self._is_chat = is_chat
        self._call: ToolCallDelta | None = None
        """The call that is being written."""

    def begin(self) -> bytes:
        return b""

    def more(self, delta: Delta) -> bytes:
        output, done = delta.output, self._take(delta.output)
        if not (output.text or output.reasoning or done):
            return b""
        return self._written(_line(self._context, output, done, is_chat=self._is_chat))

    def end(self, finish: Finish, resumptions: int) -> Iterable[bytes]:
        written = b""
        if self._call is not None:
            written = self._written(_line(self._context, Output(), [self._call], is_chat=self._is_chat))
        last = _line(self._context, Output(), (), is_chat=self._is_chat)
        return (written + with_resumptions(self._written(_ended(last, self._context, finish)), resumptions),)

    def _take(self, output: Output) -> list[ToolCallDelta]:
        """The calls that have ended; the last one may go on."""
        done: list[ToolCallDelta] = []
        for call in output.tool_calls:
            if self._call is not None and self._call.index == call.index:
                self._call.arguments += call.arguments
                continue
            if self._call is not None:
                done.append(self._call)
            self._call = ToolCallDelta(call.index, call.id, call.name, call.arguments)
        return done

    @staticmethod
    def _written(line: OllamaAnswer) -> bytes:
        return msgspec.json.encode(line) + b"\n"


def _line(context: RequestContext, output: Output, calls: Iterable[ToolCallDelta], *, is_chat: bool) -> OllamaAnswer:
    made = OllamaAnswer(model=context.public_model, created_at=_now(), done=False)
    if not is_chat:
        made.response, made.thinking = output.text, output.reasoning or None
        return made
    made.message = {"role": "assistant", "content": output.text}
    if output.reasoning:
        made.message["thinking"] = output.reasoning
    if objects := [_call_object(call) for call in calls]:
        made.message["tool_calls"] = objects
    return made


def _call_object(call: ToolCallDelta) -> dict[str, Any]:
    arguments = msgspec.Raw(whole_arguments(call.arguments).encode())
    return {"id": call.id, "function": {"index": call.index, "name": call.name, "arguments": arguments}}


def _ended(line: OllamaAnswer, context: RequestContext, finish: Finish) -> OllamaAnswer:
    """The last line of an answer."""
    now = time.perf_counter()
    first = now if context.first_token is None else context.first_token
    line.done, line.done_reason = True, finish.reason.value
    line.total_duration, line.load_duration = _nanoseconds(now - context.started), 0
    line.prompt_eval_count, line.prompt_eval_duration = (
        finish.usage.prompt_tokens,
        _nanoseconds(first - context.started),
    )
    line.eval_count, line.eval_duration = finish.usage.completion_tokens, _nanoseconds(now - first)
    return line


def _nanoseconds(seconds: float) -> int:
    return max(1, round(seconds * 1e9))


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


_PREFIX = "options."
IGNORED_OPTIONS = frozenset(
    {
        "num_ctx",
        "num_keep",
        "num_batch",
        "num_gpu",
        "main_gpu",
        "num_thread",
        "numa",
        "low_vram",
        "f16_kv",
        "vocab_only",
    }
    | {"use_mmap", "use_mlock", "penalize_newline"}
)
"""How Ollama would load the model: never change an answer here."""
_RENAMED = {"repeat_penalty": "repetition_penalty"}
_EFFORTS = ("low", "medium", "high", "max")


class _Options(msgspec.Struct):
    """``options``, except those that are sampling settings of the same name."""

    num_predict: int | None = None
    repeat_penalty: float | None = None
    stop: str | list[str] | None = None


def fields_of(prompt: str) -> FieldNames:
    """How clients spell the fields of errors."""
    return FieldNames(
        prompt=prompt,
        sampling=_PREFIX,
        max_tokens=f"{_PREFIX}num_predict",
        call="function.",
        reasoning="thinking",
        grammar="format",
        template_variables="think",
        stop=f"{_PREFIX}stop",
        items="images",
    )


def settings_of(
    given: dict[str, Any] | None, fields: FieldNames, seeds: Seeds, left_out: LeftOut
) -> tuple[SamplingParams, OutputOptions]:
    """The sampling settings, and how tokens become output.

    Raises:
        InvalidArgumentError: One is of the wrong type or out of range.
    """
    given = given or {}
    options = convert(given, _Options, {}, IGNORED_OPTIONS | TEXT_SAMPLING, prefix=_PREFIX, left_out=left_out)
    own = {ours: given[theirs] for theirs, ours in _RENAMED.items() if given.get(theirs) is not None}
    wanted = options.num_predict
    try:
        sampling = sampling_of(
            given, fields, seeds, max_tokens=None if wanted is None or wanted < 0 else max(1, wanted), **own
        )
    except InvalidArgumentError as error:
        for theirs, ours in _RENAMED.items():
            if theirs in given and error.field == f"{_PREFIX}{ours}":
                raise InvalidArgumentError(error.message, field=f"{_PREFIX}{theirs}") from error
        raise
    stop = [options.stop] if isinstance(options.stop, str) else options.stop or ()
    return sampling, OutputOptions(stop=tuple(stop))


def grammar_of(request: OllamaRequest) -> AnswerGrammar | None:
    """What the answer must match.

    Raises:
        InvalidArgumentError: The format is none.
    """
    match request.format:
        case None | "":
            return None
        case "json":
            return AnswerGrammar("json_schema", '{"type": "object"}')
        case dict() as schema:
            return AnswerGrammar("json_schema", msgspec.json.encode(schema).decode(), lenient=True)
    raise InvalidArgumentError('format must be "json" or a JSON schema', field="format")


def template_variables(request: OllamaRequest) -> str:
    """What ``think`` means to templates.

    Raises:
        InvalidArgumentError: It is no such word.
    """
    think = request.think
    if think is None or think == "":
        return ""
    if isinstance(think, str) and think not in _EFFORTS:
        raise InvalidArgumentError(f"think must be a boolean or one of {', '.join(_EFFORTS)}", field="think")
    variables = effort_variables(think) if isinstance(think, str) else {"enable_thinking": think, "thinking": think}
    return msgspec.json.encode(variables).decode()
