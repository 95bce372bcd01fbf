"""``/v1/responses``: answers, keeps the answers, and returns them later."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from sapwood_common.contract.sampling import MOST_LOGPROBS
from sapwood_common.contract.seeds import Seeds
from sapwood_common.errors import (
    InvalidArgumentError,
    NotFoundError,
    PromptTooLongError,
    RequestCancelledError,
    SapwoodError,
)
from sapwood_router.edges.http.errors import error_code, http_status
from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.edges.http.json_body import Neutral, convert, decode_object
from sapwood_router.edges.http.left_out import LeftOut
from sapwood_router.edges.http.listing import listing
from sapwood_router.edges.http.metadata import checked_metadata
from sapwood_router.edges.http1.errors import HttpError
from sapwood_router.edges.openai.other_parameters import IGNORED, STREAM_NEUTRAL, STREAM_SPARED
from sapwood_router.edges.openai.parameters import (
    TEXT_SAMPLING,
    effort_variables,
    sampling_of,
    thinking_variables,
    truncation_of,
)
from sapwood_router.edges.responses.background import PATH, Background
from sapwood_router.edges.responses.events import ResponseEvents, StreamDialect
from sapwood_router.edges.responses.items import (
    Conversation,
    ItemMaker,
    input_items,
    packed,
    response_of,
    tools_of,
    turn_of,
)
from sapwood_router.edges.responses.logprobs import TextLogprobs
from sapwood_router.edges.responses.store import ConversationStore, ResponseStore, StoredResponse
from sapwood_router.edges.responses.tool_loop import MCP, ToolLoop, listed_in, plain_choice, uses_servers
from sapwood_router.edges.responses.types import Item, ResponsesRequest, TextFormat, Tool
from sapwood_router.edges.sending import send_events, send_whole, told_headers
from sapwood_router.edges.telling import Telling
from sapwood_router.flow.generation import Pipeline
from sapwood_router.flow.prepare import settle_model
from sapwood_router.request.cache_hint import FIELD, CacheHint, cache_hint_of
from sapwood_router.request.context import (
    AnswerGrammar,
    ChatPrompt,
    FieldNames,
    Finish,
    FinishReason,
    RequestContext,
    Truncation,
    Turn,
    unique_id,
)
from sapwood_router.request.field_names import to_client_field
from sapwood_router.request.output import Output, OutputOptions, ToolCallDelta
from sapwood_router.request.validation import check_prompt
from sapwood_router.tools.mcp_servers import McpServers

NEUTRAL: Neutral = {
    "context_management": ([],),
    "moderation": (),
    "prompt": (),
}
"""Parameters that are taken only with the values that ask for nothing."""
SPARED = frozenset({"context_management", "moderation"})
"""Those of them that an answer may be made without."""
ALSO_IGNORED = frozenset({"client_metadata"})
"""Codex's data about itself."""
BESIDE = (IGNORED | ALSO_IGNORED | TEXT_SAMPLING) - {"metadata"}
"""Parameters that a request may have beside the fields of its type."""
_LOGPROBS = "message.output_text.logprobs"
_FORMAT = "text.format"
_INPUT_ITEMS, _CANCEL = "input_items", "cancel"
"""What stands behind a response's id in a path."""
_COMPACT = (
    "Write down in short what was said and done so far, so that somebody who has not read it can go on in your place: the task, "
    "what was decided and why, names, numbers and paths that matter, what was tried, and what is still to be done. Write "
    "nothing else."
)


class _NoOptions(msgspec.Struct):
    """``stream_options``: none of them asks for anything that is served."""


class _Outputs(msgspec.Struct):
    """The items of a response."""

    output: list[Item]


class ResponsesApi:
    """The API over what is kept.

    Args:
        store: Keeps responses.
        conversations: Keeps conversations.
        servers: MCP servers, whose tools requests may use.
        background: Makes responses that nobody waits for.
    """

    def __init__(
        self, store: ResponseStore, conversations: ConversationStore, servers: McpServers, background: Background
    ) -> None:
        self._servers = servers
        self._store = store
        self._conversations = conversations
        self.background = background

    async def create(self, exchange: Exchange, body: bytes, pipeline: Pipeline, deadline: float) -> None:
        """Answers a request.

        Raises:
            SapwoodError: It is wrong, or it failed.
        """
        given = decode_object(body)
        request = convert(given, ResponsesRequest, NEUTRAL, BESIDE, left_out=exchange.left_out, spared=SPARED)
        stream = _wants_stream(request, exchange.left_out)
        exchange.accept_body_id(request)
        tenant = exchange.tenant
        if request.input is None:
            raise InvalidArgumentError("input is required", field="input")
        checked_metadata(request.metadata)
        conversation, own = await self._conversation(exchange, request)
        if uses_servers(request, self._servers):
            await self._answer_with_servers(exchange, request, given, (conversation, own), pipeline, deadline)
            return
        context = _context(
            request, given, conversation, exchange.request_id, deadline, pipeline.seeds, exchange.left_out
        )
        context.deadline = deadline if stream or request.background else exchange.sooner(deadline)
        context.caller, context.hint = exchange.caller(request, given), _hint(request, given)
        logprobs = None
        if context.sampling.logprobs is not None:
            tokenizer, stint = pipeline.tokenizers.of(request.model).client, pipeline.heavy.stint(tenant)
            logprobs = TextLogprobs(context, Telling(tokenizer, stint))
        keeps = request.store is not False and self._store.keeps
        answer = _Answer(request, context, pipeline, keeps=keeps, resumes=exchange.resumes)
        if request.background and (stream or not answer.keeps):
            raise InvalidArgumentError(
                "background needs store, and is not served with stream", field="stream" if stream else "background"
            )
        asked = input_items(given["input"], answer.secret) if answer.keeps or request.conversation is not None else []
        items = msgspec.json.encode(asked) if answer.keeps else b""
        belongs_to = _conversation_id(request)

        async def keep(
            encoded: bytes, turns: tuple[Turn, ...], *, done: bool = True, output: Sequence[dict[str, Any]] = ()
        ) -> None:
            previous, background = request.previous_response_id, request.background is True
            stored = StoredResponse(answer.response_id, encoded, turns, previous, items, done, background)
            fresh = input_items(
                [{**item, "id": None} for item in asked], answer.secret
            )  # ids of this conversation's own
            added = self._conversations.records(tenant, belongs_to, [*fresh, *output]) if belongs_to and done else ()
            if answer.keeps:
                await self._store.put(tenant, stored, added)
            elif added:
                await self._conversations.add(tenant, belongs_to, [*fresh, *output])

        def written(output: Output, response: dict[str, Any]) -> msgspec.Raw:
            encoded = msgspec.json.encode(response)  # once, for the client and to be kept
            if answer.keeps or belongs_to:
                turns = (*own.turns, turn_of(output))
                exchange.before_last = partial(keep, encoded, turns, output=response["output"])
            return msgspec.Raw(encoded)

        if not stream:

            def whole(output: Output, finish: Finish) -> msgspec.Raw:
                tokens = () if logprobs is None else logprobs.take()
                return written(output, answer.ended(finish, answer.items_of(output, finish, tokens)))

            if not request.background:
                await send_whole(exchange, context, pipeline, whole, logprobs)
                return
            settle_model(context, pipeline.registry)
            context.model = pipeline.registry.resolve(context.model)
            begun = msgspec.json.encode(answer.begun())
            await keep(begun, tuple(own.turns), done=False)

            async def succeeded(output: Output, finish: Finish) -> None:
                tokens = () if logprobs is None else logprobs.take()
                response = answer.ended(finish, answer.items_of(output, finish, tokens))
                turns = (*own.turns, turn_of(output))
                await keep(msgspec.json.encode(response), turns, output=response["output"])

            async def failed(error: SapwoodError) -> None:
                await keep(msgspec.json.encode(answer.failed(error)), tuple(own.turns))

            await self.background.begin(
                tenant, answer.response_id, bytes(body), pipeline, context, succeeded, failed, logprobs
            )
            await exchange.send_body(200, msgspec.json.encode(answer.queued()))
            return

        def ended(finish: Finish, items: list[dict[str, Any]]) -> tuple[str, msgspec.Raw]:
            response = answer.ended(finish, items)
            return response["status"], written(_output_of(items), response)

        events = ResponseEvents(answer.items, answer.begun, ended, answer.failed, logprobs)
        exchange.dialect = StreamDialect(events)
        try:
            await send_events(exchange, [context], pipeline, events, logprobs)
        except PromptTooLongError as error:
            if exchange.started:
                raise
            # OpenAI says so in the stream, and by that Codex makes its conversation shorter; a 400 is a mistake to it.
            await exchange.send_events(events.begin() + events.fail(error), last=True)

    async def _answer_with_servers(
        self,
        exchange: Exchange,
        request: ResponsesRequest,
        given: dict[str, Any],
        conversations: tuple[Conversation, Conversation],
        pipeline: Pipeline,
        deadline: float,
    ) -> None:
        """Answers a request with tools of MCP servers. A stream has each item whole, as soon as it is made.

        Args:
            exchange: The request.
            request, given: Its body.
            conversations: All that the model reads, and what of it is the request's own.
            pipeline: Runs the rounds.
            deadline: Of all of them together.

        Raises:
            SapwoodError: It is wrong, or it failed.
        """
        if request.background or request.top_logprobs or request.include:
            raise InvalidArgumentError("background, include and top_logprobs are not served with tools of type mcp")
        conversation, own = conversations
        tenant, caller = exchange.tenant, exchange.caller(request, given)
        deadline = deadline if request.stream else exchange.sooner(deadline)
        tools: list[Tool] = [tool for tool in request.tools or () if tool.type != MCP]

        def make(turns: Sequence[Turn], first: bool) -> RequestContext:
            talk = Conversation()
            for path, turn in zip(conversation.paths, conversation.turns, strict=True):
                talk.add(path, turn)
            for turn in turns:
                talk.add("input", turn)
            choice = plain_choice(request.tool_choice) if first or request.tool_choice == "none" else None
            each = msgspec.structs.replace(request, tools=tools or None, tool_choice=choice if tools else None)
            made = _context(each, given, talk, exchange.request_id, deadline, pipeline.seeds, exchange.left_out)
            made.caller, made.hint, made.whole = caller, _hint(request, given), True
            return made

        context = make((), False)
        settle_model(context, pipeline.registry)
        context.model = pipeline.registry.resolve(context.model)
        answer = _Answer(request, context, pipeline, keeps=request.store is not False and self._store.keeps)
        events = ResponseEvents(answer.items, answer.begun, lambda finish, items: ("", msgspec.Raw()), answer.failed)

        async def tell(index: int, item: dict[str, Any]) -> None:
            if request.stream:
                await exchange.send_events(events.whole_item(index, item))

        loop = ToolLoop(request, self._servers, tenant, exchange.request_id, answer.items, tell)
        known = await self._approvals(tenant, request.input)
        exchange.on_disconnect(lambda: None)
        if request.stream:
            exchange.dialect = StreamDialect(events)
            await exchange.send_events(events.begin())
        tools = await loop.offer(listed_in(given["input"]))
        await loop.answer_approvals([] if isinstance(request.input, str) else request.input or [], known)
        finish, last = await loop.run(make, pipeline)
        response = answer.ended(finish, loop.made)
        encoded = msgspec.json.encode(response)
        belongs_to = _conversation_id(request)
        if answer.keeps or belongs_to:
            asked = input_items(given["input"], answer.secret)
            turns, previous = (*own.turns, *loop.turns), request.previous_response_id
            fresh = input_items([{**item, "id": None} for item in asked], answer.secret)
            added = self._conversations.records(tenant, belongs_to, [*fresh, *loop.made]) if belongs_to else []
            if answer.keeps:
                stored = StoredResponse(answer.response_id, encoded, turns, previous, msgspec.json.encode(asked))
                exchange.before_last = partial(self._store.put, tenant, stored, added)
            else:
                exchange.before_last = partial(self._conversations.add, tenant, belongs_to, [*fresh, *loop.made])
        if request.stream:
            await exchange.send_events(events.last(response["status"], msgspec.Raw(encoded)), last=True)
        else:
            await exchange.send_body(200, encoded, told_headers(exchange.workers, [last]))

    async def _approvals(self, tenant: str, given: str | list[Item] | None) -> dict[str, Item]:
        """The items in which approval was asked for, by id: those of the input, and those of answers that are kept.

        Raises:
            NotFoundError: An answer is not kept.
        """
        found: dict[str, Item] = {}
        for number, item in enumerate([] if isinstance(given, str) or given is None else given):
            if item.type == "mcp_approval_request" and item.id:
                found[item.id] = item
            asked = item.approval_request_id if item.type == "mcp_approval_response" else None
            if asked and asked not in found:
                response_id, index = response_of(asked)
                body = (await self._store.get(tenant, response_id, f"input[{number}].approval_request_id")).body
                items = msgspec.json.decode(body, type=_Outputs).output
                if index < len(items):
                    found[asked] = items[index]
        return found

    async def _conversation(self, exchange: Exchange, request: ResponsesRequest) -> tuple[Conversation, Conversation]:
        """All items that the model reads, and which of them are the request's own.

        Raises:
            SapwoodError: The request has an unknown field, or refers to a response that is not kept.
        """
        tenant, conversation = exchange.tenant, Conversation()
        if request.instructions:
            conversation.add("instructions", Turn("system", request.instructions))
        if request.previous_response_id is not None:
            field = "previous_response_id"
            if request.conversation is not None:
                raise InvalidArgumentError(f"{field} is not allowed with conversation", field=field)
            for turn in await self._store.history(tenant, request.previous_response_id, field):
                conversation.add(field, turn)
        own = Conversation()
        if known := _conversation_id(request):
            await self._conversations.get(tenant, known, "conversation")
            said = msgspec.convert(await self._conversations.items(tenant, known), list[Item])
            await exchange.in_turns(own.take(said, {}, exchange.left_out, "conversation"))
        if request.input is not None:
            found = await self._named_items(tenant, request.input)
            await exchange.in_turns(own.take(request.input, found, exchange.left_out))
        for path, turn in zip(own.paths, own.turns, strict=True):
            conversation.add(path, turn)
        return conversation, own

    async def count(self, exchange: Exchange, body: bytes, pipeline: Pipeline, deadline: float) -> None:
        """Counts the tokens of what the model would read.

        Raises:
            SapwoodError: The request is wrong, or the tokenizer does not say.
        """
        given = decode_object(body)
        request = convert(given, ResponsesRequest, NEUTRAL, BESIDE, left_out=exchange.left_out, spared=SPARED)
        exchange.accept_body_id(request)
        conversation, _ = await self._conversation(exchange, request)
        if not conversation.turns:
            raise InvalidArgumentError("input is required, or previous_response_id", field="input")
        context = _context(
            request, given, conversation, exchange.request_id, deadline, pipeline.seeds, exchange.left_out
        )
        caller, prompt = exchange.caller(request, given), context.prompt
        assert isinstance(prompt, ChatPrompt), "all are conversations"
        check_prompt(prompt, context.fields)
        exchange.on_disconnect(lambda: None)
        client = pipeline.tokenizers.of(pipeline.registry.resolve(request.model)).client
        try:
            encoded = await client.encode_chat(
                prompt, exchange.request_id, exchange.sooner(deadline), caller.cache_salt
            )
        except SapwoodError as error:
            raise to_client_field(error, context.fields) from error
        counted = {"object": "response.input_tokens", "input_tokens": len(encoded.token_ids)}
        await exchange.send_body(200, msgspec.json.encode(counted))

    async def compact(self, exchange: Exchange, body: bytes, pipeline: Pipeline, deadline: float) -> None:
        """Has the model write a conversation in short. What it wrote stands for the conversation in a later input.

        Raises:
            SapwoodError: The request is wrong, or it failed.
        """
        given = decode_object(body)
        request = convert(given, ResponsesRequest, NEUTRAL, BESIDE, left_out=exchange.left_out, spared=SPARED)
        exchange.accept_body_id(request)
        conversation, own = await self._conversation(exchange, request)
        if not own.turns and request.previous_response_id is None:
            raise InvalidArgumentError("input is required, or previous_response_id", field="input")
        conversation.add("input", Turn("user", _COMPACT))
        plain = msgspec.structs.replace(request, tools=None, tool_choice=None, text=None, include=None, stream=None)
        context = _context(plain, given, conversation, exchange.request_id, deadline, pipeline.seeds, exchange.left_out)
        context.deadline, context.caller = exchange.sooner(deadline), exchange.caller(request, given)
        context.truncation = context.truncation or Truncation(-1, drops_turns=True)
        answer = _Answer(plain, context, pipeline, keeps=False)

        def compacted(output: Output, finish: Finish) -> msgspec.Raw:
            item = {
                "id": f"cmp_{answer.secret}",
                "type": "compaction",
                "encrypted_content": packed(output.text.strip()),
            }
            said = [each for each in input_items(given.get("input") or [], answer.secret) if each.get("role") == "user"]
            usage = answer.ended(finish, [])["usage"]
            fields = {"id": answer.response_id, "object": "response.compaction", "created_at": answer.created}
            return msgspec.Raw(msgspec.json.encode({**fields, "output": [*said, item], "usage": usage}))

        await send_whole(exchange, context, pipeline, compacted)

    async def _named_items(self, tenant: str, given: str | list[Item]) -> dict[str, Item]:
        """The items of answers that are kept, by their ids, as far as an input refers to them.

        Raises:
            NotFoundError: One is not kept.
        """
        found: dict[str, Item] = {}
        read: dict[str, list[Item]] = {}
        for number, item in enumerate([] if isinstance(given, str) else given):
            if item.type != "item_reference" or not item.id:
                continue
            field = f"input[{number}].id"
            response_id, index = response_of(item.id)
            if response_id not in read:
                body = (await self._store.get(tenant, response_id, field)).body
                read[response_id] = msgspec.json.decode(body, type=_Outputs).output
            if not 0 <= index < len(read[response_id]):
                raise NotFoundError(f"there is no item {item.id[:100]!r}", field=field)
            found[item.id] = read[response_id][index]
        return found

    async def show(self, exchange: Exchange) -> None:
        """Gives out a response that is kept, or the items of its input.

        Raises:
            NotFoundError: It is not.
        """
        response_id, _, below = _id_in(exchange.path).partition("/")
        if below not in ("", _INPUT_ITEMS):
            raise HttpError(404, f"there is no {exchange.path}")
        kept = await self._store.get(exchange.tenant, response_id)
        if below:
            await exchange.send_body(200, listing(msgspec.json.decode(kept.items), exchange.query))
            return
        if exchange.query.get("stream") == "true":
            raise InvalidArgumentError("a response that is kept is not streamed again", field="stream")
        await exchange.send_body(200, kept.body)

    async def cancel(self, exchange: Exchange, body: bytes, pipeline: Pipeline, deadline: float) -> None:
        """Ends a response that is made in the background; one that has ended stays as it is.

        Raises:
            NotFoundError: It is not kept.
            InvalidArgumentError: Its client waits, or has waited, for it.
        """
        response_id, _, below = _id_in(exchange.path).partition("/")
        if below != _CANCEL:
            raise HttpError(404, f"{exchange.path} takes no POST; a response does at {PATH}/ID/{_CANCEL}")
        tenant = exchange.tenant
        if not (await self._store.get(tenant, response_id)).in_background:
            raise InvalidArgumentError("only a response in the background can be cancelled", field="response_id")
        if await self.background.cancel(tenant, response_id):
            kept = await self._store.get(tenant, response_id)
            answer = {**msgspec.json.decode(kept.body), "status": "cancelled"}
            cancelled = msgspec.structs.replace(kept, body=msgspec.json.encode(answer), done=True)
            await self._store.put(tenant, cancelled)
        await exchange.send_body(200, (await self._store.get(tenant, response_id)).body)

    async def delete(self, exchange: Exchange) -> None:
        """Forgets a response.

        Raises:
            NotFoundError: It is not kept.
        """
        response_id = _id_in(exchange.path)
        await self._store.get(exchange.tenant, response_id)
        await self.background.cancel(exchange.tenant, response_id)
        await self._store.delete(exchange.tenant, response_id)
        body = {"id": response_id, "object": "response", "deleted": True}
        await exchange.send_body(200, msgspec.json.encode(body))


class _Answer:
    """Makes the response of one request, at each moment of its life."""

    def __init__(
        self, request: ResponsesRequest, context: RequestContext, pipeline: Pipeline, *, keeps: bool, resumes: str = ""
    ) -> None:
        secret = self.secret = resumes.removeprefix("resp_") or secrets.token_hex(16)
        self.response_id = f"resp_{secret}"
        self.items = ItemMaker(secret)
        self.keeps = keeps
        self._request = request
        self._context = context
        self._registry = pipeline.registry
        self.created = int(time.time())

    def queued(self) -> dict[str, Any]:
        """The response before it is begun."""
        return self._make("queued", [])

    def begun(self) -> dict[str, Any]:
        """The response before its first item."""
        return self._make("in_progress", [])

    def ended(self, finish: Finish, items: list[dict[str, Any]]) -> dict[str, Any]:
        """The response at its end."""
        usage = finish.usage
        counts = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": usage.written_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        if finish.reason is FinishReason.LENGTH:
            return self._make("incomplete", items, usage=counts, incomplete_details={"reason": "max_output_tokens"})
        if finish.reason is FinishReason.ABORT and self._request.background:
            return self._make("cancelled", items, usage=counts)
        if finish.reason is FinishReason.ABORT:
            return self._make("incomplete", items, usage=counts, incomplete_details={"reason": "aborted"})
        return self._make("completed", items, usage=counts)

    def failed(self, error: SapwoodError) -> dict[str, Any]:
        """The response where the run failed with ``error``."""
        if isinstance(error, RequestCancelledError):
            return self._make("cancelled", [])
        code = error_code(error) or ("rate_limit_exceeded" if http_status(error) == 429 else "server_error")
        return self._make("failed", [], error={"code": code, "message": error.message})

    def items_of(self, output: Output, finish: Finish, logprobs: object) -> list[dict[str, Any]]:
        """The items of an answer in one piece; ``logprobs`` are those of its text."""
        made: list[dict[str, Any]] = []
        if output.reasoning:
            made.append(self.items.reasoning(len(made), output.reasoning, "completed"))
        if output.text or not (made or output.tool_calls):
            made.append(self.items.message(len(made), output.text, "completed", logprobs))
        for call in output.tool_calls:
            made.append(self.items.call(len(made), call.id, call.name, call.arguments, "completed"))
        if finish.reason is not FinishReason.STOP:
            made[-1]["status"] = "incomplete"
        return made

    def _make(self, status: str, items: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        request, model = self._request, self._context.public_model
        sampling = self._context.sampling.applied(self._registry.sampling_defaults(model))
        reasoning = request.reasoning
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": request.background is True,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "model": model,
            "output": items,
            "parallel_tool_calls": self._context.parallel_tool_calls,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
            "store": self.keeps,
            "temperature": sampling.temperature,
            "text": request.text or {"format": {"type": "text"}},
            "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
            "tools": [_without_secrets(tool) for tool in request.tools or ()],
            "top_logprobs": sampling.logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": request.truncation or "disabled",
            "usage": None,
            "metadata": request.metadata or {},
            **({"conversation": {"id": belongs_to}} if (belongs_to := _conversation_id(request)) else {}),
            **more,
        }


def _output_of(items: list[dict[str, Any]]) -> Output:
    """The output that items tell."""
    made = Output()
    for item in items:
        if item["type"] == "reasoning":
            made.reasoning += item["content"][0]["text"]
        elif item["type"] == "message":
            made.text += item["content"][0]["text"]
        else:
            call = ToolCallDelta(len(made.tool_calls), item["call_id"], item["name"], item["arguments"])
            made.tool_calls.append(call)
    return made


def _conversation_id(request: ResponsesRequest) -> str:
    """The conversation that a request goes on with; "": none."""
    if request.conversation is None:
        return ""
    return request.conversation if isinstance(request.conversation, str) else request.conversation.id


def _without_secrets(tool: Tool) -> Tool:
    """A tool as an answer tells it, and as it is kept: without what only its server is to see."""
    return msgspec.structs.replace(tool, headers=None, authorization=None)


def _id_in(path: str) -> str:
    return path.removeprefix(f"{PATH}/")


def _wants_stream(request: ResponsesRequest, left_out: LeftOut) -> bool:
    if request.stream_options is not None:
        if not request.stream:
            raise InvalidArgumentError("stream_options is only allowed with stream", field="stream_options")
        options = request.stream_options
        prefix = "stream_options."
        convert(options, _NoOptions, STREAM_NEUTRAL, prefix=prefix, left_out=left_out, spared=STREAM_SPARED)
    return request.stream is True


def _context(
    request: ResponsesRequest,
    given: dict[str, Any],
    conversation: Conversation,
    request_id: str,
    deadline: float,
    seeds: Seeds,
    left_out: LeftOut,
) -> RequestContext:
    fields = FieldNames(
        prompt="input",
        sampling="",
        max_tokens="max_output_tokens",
        grammar=f"{_FORMAT}.schema",
        tool_name="tool_choice.name",
        template_variables="chat_template_kwargs",
        turns=tuple(conversation.paths),
        items="content",
        tool="",
    )
    tools, choice = tools_of(request, left_out)
    return RequestContext(
        request_id=request_id,
        worker_request_id=unique_id(request_id),
        prompt=ChatPrompt(tuple(conversation.turns), tools, _template_variables(request)),
        sampling=sampling_of(
            given, fields, seeds, max_tokens=request.max_output_tokens, logprobs=_logprobs_of(request)
        ),
        output=OutputOptions(),
        fields=fields,
        deadline=deadline,
        model=request.model,
        truncation=_truncation(request),
        whole=not request.stream,
        grammar=None if request.text is None or request.text.format is None else _grammar(request.text.format),
        tool_choice=choice,
        parallel_tool_calls=request.parallel_tool_calls is not False,
    )


def _truncation(request: ResponsesRequest) -> Truncation | None:
    """How a long conversation is cut: as the extension says, else as OpenAI's parameter does."""
    if (wanted := truncation_of(request)) is not None:
        return wanted
    return Truncation(-1, drops_turns=True) if request.truncation == "auto" else None


def _logprobs_of(request: ResponsesRequest) -> int | None:
    """How many alternatives are reported for each token of the text; None: no token is reported."""
    top = request.top_logprobs
    if top is not None and not 0 <= top <= MOST_LOGPROBS:
        raise InvalidArgumentError(f"top_logprobs must be in 0..{MOST_LOGPROBS}, got {top}", field="top_logprobs")
    if request.include and _LOGPROBS in request.include:
        return top or 0
    if top:
        raise InvalidArgumentError(f"top_logprobs is only allowed with include: [{_LOGPROBS!r}]", field="top_logprobs")
    return None


def _grammar(form: TextFormat) -> AnswerGrammar | None:
    if form.type == "text":
        return None
    if form.type == "json_object":
        return AnswerGrammar("json_schema", '{"type": "object"}')
    if form.name is None:
        raise InvalidArgumentError(f"{_FORMAT}.name is required", field=f"{_FORMAT}.name")
    if form.schema is None:
        raise InvalidArgumentError(f"{_FORMAT}.schema is required", field=f"{_FORMAT}.schema")
    return AnswerGrammar("json_schema", msgspec.json.encode(form.schema).decode(), lenient=form.strict is not True)


def _template_variables(request: ResponsesRequest) -> str:
    """Variables for the chat template, under the names that chats use."""
    variables: dict[str, Any] = {}
    if request.reasoning is not None and request.reasoning.effort is not None:
        variables = effort_variables(request.reasoning.effort)
    if request.text is not None and request.text.verbosity is not None:
        variables["verbosity"] = request.text.verbosity
    variables |= thinking_variables(request)
    variables |= request.chat_template_kwargs or {}
    return msgspec.json.encode(variables).decode() if variables else ""


def _hint(request: ResponsesRequest, given: Mapping[str, Any]) -> CacheHint:
    hint = cache_hint_of(request.cache_hint, given)
    if hint.prefetch:
        raise InvalidArgumentError("cache_hint.prefetch is served for chats, completions and messages", field=FIELD)
    return hint
