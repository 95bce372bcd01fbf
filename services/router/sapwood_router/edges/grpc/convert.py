"""Protobuf messages to the router's own types and back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING

from sapwood.v1 import common_pb2, router_pb2, tokenizer_pb2, worker_pb2
from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.contract.sampling_message import to_message
from sapwood_common.errors import InvalidArgumentError, SapwoodError
from sapwood_common.status import from_parts
from sapwood_router.fleet.output import WorkerOutput
from sapwood_router.fleet.served_model import ServedModel
from sapwood_router.request.caller import Caller
from sapwood_router.request.context import (
    ChatPrompt,
    Delta,
    FieldNames,
    FinishReason,
    Prompt,
    RequestContext,
    TextPrompt,
    TokenPrompt,
    ToolCall,
    Truncation,
    Turn,
    Usage,
)
from sapwood_router.request.embed_request import EmbedRequest
from sapwood_router.request.logprobs import TokenLogprobs
from sapwood_router.request.output import Output, OutputOptions, ToolCallDelta
from sapwood_router.request.structure import AnswerGrammar, ToolChoice
from sapwood_router.routing.load import Load

if TYPE_CHECKING:
    from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

_TO_PROTO = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}
_FROM_PROTO = {value: key for key, value in _TO_PROTO.items()}


def prompt_of(request: router_pb2.RouterGenerateRequest) -> tuple[Prompt, FieldNames]:
    """The prompt of a request, and how to name it in errors.

    Raises:
        InvalidArgumentError: No prompt is set, or tools or template variables go with one that is not messages.
    """
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
            return TextPrompt(request.text), FieldNames(prompt="text")
        case "messages":
            turns = tuple(map(_turn_of, request.messages.messages))
            prompted = request.add_generation_prompt if request.HasField("add_generation_prompt") else None
            prompt = ChatPrompt(turns, tools, request.template_variables, prompted, request.continue_final_message)
            return prompt, FieldNames(prompt="messages.messages")
        case "tokens":
            return TokenPrompt(list(request.tokens.ids)), FieldNames(prompt="tokens.ids")
        case _:
            raise InvalidArgumentError("no prompt: set text, messages or tokens", field="prompt")


def truncation_of(request: router_pb2.RouterGenerateRequest) -> Truncation | None:
    """How its prompt is cut."""
    if not request.HasField("truncate_prompt_tokens"):
        return None
    return Truncation(request.truncate_prompt_tokens, request.truncate_right)


def tool_choice_of(request: router_pb2.RouterGenerateRequest) -> ToolChoice:
    """Which calls a request wants.

    Raises:
        InvalidArgumentError: A tool is named, but no call wanted; or calls are required and no tools given.
    """
    free = request.tool_choice in (router_pb2.TOOL_CHOICE_AUTO, router_pb2.TOOL_CHOICE_NONE)
    name = request.tool_choice_function
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
    message = request.grammar
    kind = message.WhichOneof("grammar")
    if kind is None:
        raise InvalidArgumentError("grammar is empty", field="grammar")
    if kind == "compiled":
        raise InvalidArgumentError("grammar.compiled is taken from services only", field="grammar.compiled")
    text = {
        "json_schema": message.json_schema,
        "regex": message.regex,
        "ebnf": message.ebnf,
        "structural_tag": message.structural_tag,
    }[kind]
    options = message.options
    whitespace = options.any_whitespace if options.HasField("any_whitespace") else True
    return AnswerGrammar(kind, text, whitespace, options.lenient)


def to_grammar(grammar: AnswerGrammar) -> common_pb2.Grammar:
    """A grammar as a message."""
    options = common_pb2.GrammarOptions(any_whitespace=grammar.any_whitespace, lenient=grammar.lenient)
    match grammar.kind:
        case "json_schema":
            return common_pb2.Grammar(json_schema=grammar.text, options=options)
        case "regex":
            return common_pb2.Grammar(regex=grammar.text, options=options)
        case "ebnf":
            return common_pb2.Grammar(ebnf=grammar.text, options=options)
        case "structural_tag":
            return common_pb2.Grammar(structural_tag=grammar.text, options=options)


def to_compile_request(context: RequestContext) -> tokenizer_pb2.CompileGrammarRequest:
    """What the tokenizer service is asked to compile for a request whose prompt and parsers are known."""
    prompt, choice, output = context.prompt, context.tool_choice, context.output
    request = tokenizer_pb2.CompileGrammarRequest(
        reasoning_parser=output.reasoning_parser, cache_salt=context.caller.cache_salt
    )
    if output.reasoning_open is not None:
        request.reasoning_open = output.reasoning_open
    if context.grammar is not None:
        request.grammar.CopyFrom(to_grammar(context.grammar))
    if isinstance(prompt, ChatPrompt) and prompt.tools and (choice.required or output.tool_parser):
        request.tool_calls.tools = prompt.tools
        request.tool_calls.name = choice.name
        request.tool_calls.required = choice.required
        request.tool_calls.parallel = context.parallel_tool_calls and not choice.name
        request.tool_calls.tool_parser = output.tool_parser
    return request


def _turn_of(message: common_pb2.ChatMessage) -> Turn:
    return Turn(
        role=message.role,
        content=message.content if message.HasField("content") else None,
        name=message.name if message.HasField("name") else None,
        tool_calls=tuple(ToolCall(call.id, call.name, call.arguments) for call in message.tool_calls),
        tool_call_id=message.tool_call_id if message.HasField("tool_call_id") else None,
        reasoning=message.reasoning if message.HasField("reasoning") else None,
    )


def to_worker_request(
    request_id: str, token_ids: list[int], sampling: SamplingParams
) -> worker_pb2.WorkerGenerateRequest:
    """The worker's request for a prompt."""
    return worker_pb2.WorkerGenerateRequest(request_id=request_id, token_ids=token_ids, sampling=to_message(sampling))


def worker_output_of(message: worker_pb2.WorkerGenerateResponse) -> WorkerOutput:
    """A worker's message as plain values."""
    return WorkerOutput(
        token_ids=message.token_ids,
        finish=_FROM_PROTO.get(message.finish_reason),
        cached_tokens=message.usage.cached_tokens if message.HasField("usage") else None,
        logprobs=_logprobs_of(message.logprobs) if message.logprobs else (),
        prompt_logprobs=_logprobs_of(message.prompt_logprobs) if message.prompt_logprobs else (),
    )


def _logprobs_of(messages: Iterable[worker_pb2.TokenLogprobs]) -> list[TokenLogprobs]:
    return [TokenLogprobs(item.logprob, tuple(item.top_ids), tuple(item.top_logprobs)) for item in messages]


def add_logprobs(
    target: RepeatedCompositeFieldContainer[worker_pb2.TokenLogprobs], logprobs: Iterable[TokenLogprobs]
) -> None:
    """Puts them into a message."""
    for item in logprobs:
        target.add(logprob=item.logprob, top_ids=item.top_ids, top_logprobs=item.top_logprobs)


_POOLING = {
    None: worker_pb2.POOLING_UNSPECIFIED,
    "mean": worker_pb2.POOLING_MEAN,
    "last": worker_pb2.POOLING_LAST,
    "cls": worker_pb2.POOLING_CLS,
}
_POOLING_NAMES = {value: name for name, value in _POOLING.items()}


def to_embed_request(
    request: EmbedRequest, sequences: Iterable[list[int]], max_tokens: int
) -> worker_pb2.WorkerEmbedRequest:
    """The worker's request for embeddings of token sequences, cut to so many tokens, or 0."""
    caller = request.caller
    return worker_pb2.WorkerEmbedRequest(
        request_id=request.request_id,
        inputs=[common_pb2.TokenIds(ids=sequence) for sequence in sequences],
        pooling=_POOLING[request.pooling],
        normalize=request.normalize,
        priority=caller.priority,
        tenant=caller.tenant,
        cache_salt=caller.cache_salt,
        dimensions=request.dimensions or 0,
        max_tokens=max_tokens,
    )


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
        max_tokens=message.truncate_prompt_tokens if message.HasField("truncate_prompt_tokens") else None,
        deadline=deadline,
        caller=caller,
    )


def stream_error(message: worker_pb2.GenerationError | tokenizer_pb2.StreamError) -> SapwoodError:
    """The error of one stream, or of one item, of a session."""
    error = from_parts(message.code, message.message, message.field)
    if message.HasField("retry_after_ms"):
        error.retry_after = message.retry_after_ms / 1000
    return error


def served_model_of(message: worker_pb2.GetModelInfoResponse) -> ServedModel:
    """What a worker says that it serves."""
    return ServedModel(
        model=message.model,
        context_length=message.context_length,
        vocab_size=message.vocab_size,
        page_size=max(1, message.page_size),
        num_pages=message.num_pages,
        epoch=message.epoch,
        max_running=message.max_running,
        eos_token_ids=frozenset(message.eos_token_ids),
        embedding_size=message.embedding_size,
        embedded_tokens=message.embedded_tokens,
        shortened=frozenset(message.embedding_dimensions) if message.shortens_embeddings else None,
    )


def to_turns(turns: tuple[Turn, ...]) -> list[common_pb2.ChatMessage]:
    """A conversation as messages."""
    return [
        common_pb2.ChatMessage(
            role=turn.role,
            content=turn.content,
            name=turn.name,
            tool_calls=[
                common_pb2.ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in turn.tool_calls
            ],
            tool_call_id=turn.tool_call_id,
            reasoning=turn.reasoning,
        )
        for turn in turns
    ]


def to_response(delta: Delta, index: int = 0) -> router_pb2.RouterGenerateResponse:
    """What a client is sent for a delta of the continuation ``index``."""
    output = delta.output
    response = router_pb2.RouterGenerateResponse(
        text=output.text, token_ids=delta.token_ids, reasoning=output.reasoning, index=index
    )
    add_logprobs(response.logprobs, delta.logprobs)
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
    )


def load_of(message: worker_pb2.LoadReport) -> Load:
    """A worker's report as plain values."""
    return Load(
        running_requests=message.running_requests,
        waiting_requests=message.waiting_requests,
        queued_tokens=message.queued_tokens,
        used_pages=message.used_pages,
        evictable_pages=message.evictable_pages,
        num_pages=message.num_pages,
        prompt_tokens=message.prompt_tokens,
        cached_tokens=message.cached_tokens,
        epoch=message.epoch,
        kv_seq=message.kv_seq,
        kv_digest=message.kv_digest,
        host_used_pages=message.host_used_pages,
        host_num_pages=message.host_num_pages,
        device_hit_tokens=message.device_hit_tokens,
        host_hit_tokens=message.host_hit_tokens,
        storage_hit_tokens=message.storage_hit_tokens,
        storage_id=message.storage_id,
        running_tokens=message.running_tokens,
    )


def to_load(load: Load) -> worker_pb2.LoadReport:
    """A load as a message."""
    return worker_pb2.LoadReport(**asdict(load))


def to_options(options: OutputOptions) -> tokenizer_pb2.DetokenizeOptions:
    """The options that open a detokenizer stream."""
    return tokenizer_pb2.DetokenizeOptions(
        stop=options.stop,
        skip_special_tokens=options.skip_special_tokens,
        tool_parser=options.tool_parser,
        reasoning_parser=options.reasoning_parser,
        reasoning_open=options.reasoning_open,
        tools=options.tools,
        tool_call_id_seed=options.call_id_seed,
    )


def output_of(message: tokenizer_pb2.DetokenizeOutput) -> Output:
    """What a detokenizer stream gave."""
    output = Output(message.text, message.reasoning)
    if message.tool_calls:
        output.tool_calls = [
            ToolCallDelta(call.index, call.id, call.name, call.arguments) for call in message.tool_calls
        ]
    return output
