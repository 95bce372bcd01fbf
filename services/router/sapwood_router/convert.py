"""Protobuf messages to the router's own types and back."""

from __future__ import annotations

from sapwood.v1 import common_pb2, router_pb2, tokenizer_pb2, worker_pb2
from sapwood_common.errors import InvalidArgumentError, SapwoodError
from sapwood_common.status import from_parts
from sapwood_router.context import (
    ChatPrompt,
    Delta,
    FieldNames,
    FinishReason,
    Prompt,
    Sampling,
    TextPrompt,
    TokenPrompt,
    Turn,
    Usage,
)
from sapwood_router.load import Load
from sapwood_router.served_model import ServedModel
from sapwood_router.worker_output import WorkerOutput

_TO_PROTO = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}
_FROM_PROTO = {value: key for key, value in _TO_PROTO.items()}


def prompt_of(request: router_pb2.RouterGenerateRequest) -> tuple[Prompt, FieldNames]:
    """The prompt of a request, and how to name it in errors.

    Raises:
        InvalidArgumentError: No prompt is set.
    """
    match request.WhichOneof("prompt"):
        case "text":
            return TextPrompt(request.text), FieldNames(prompt="text")
        case "messages":
            turns = tuple(Turn(message.role, message.content) for message in request.messages.messages)
            return ChatPrompt(turns), FieldNames(prompt="messages.messages")
        case "tokens":
            return TokenPrompt(list(request.tokens.ids)), FieldNames(prompt="tokens.ids")
        case _:
            raise InvalidArgumentError("no prompt: set text, messages or tokens", field="prompt")


def sampling_of(message: common_pb2.SamplingParams) -> Sampling:
    """Sampling settings as plain values; absent ones are None."""
    return Sampling(
        temperature=message.temperature if message.HasField("temperature") else None,
        top_k=message.top_k if message.HasField("top_k") else None,
        top_p=message.top_p if message.HasField("top_p") else None,
        min_p=message.min_p if message.HasField("min_p") else None,
        seed=message.seed if message.HasField("seed") else None,
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos if message.HasField("ignore_eos") else None,
    )


def to_worker_request(request_id: str, token_ids: list[int], sampling: Sampling) -> worker_pb2.WorkerGenerateRequest:
    """The worker's request for a prompt."""
    return worker_pb2.WorkerGenerateRequest(
        request_id=request_id,
        token_ids=token_ids,
        sampling=common_pb2.SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=sampling.seed,
            max_tokens=sampling.max_tokens,
            stop_token_ids=sampling.stop_token_ids,
            ignore_eos=sampling.ignore_eos,
        ),
    )


def output_of(message: worker_pb2.WorkerGenerateResponse) -> WorkerOutput:
    """A worker's message as plain values."""
    return WorkerOutput(
        token_ids=message.token_ids,
        finish=_FROM_PROTO.get(message.finish_reason),
        cached_tokens=message.usage.cached_tokens if message.HasField("usage") else None,
    )


def generation_error(message: worker_pb2.GenerationError) -> SapwoodError:
    """The error of one stream of a session."""
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
    )


def to_turns(turns: tuple[Turn, ...]) -> list[common_pb2.ChatMessage]:
    """A conversation as messages."""
    return [common_pb2.ChatMessage(role=turn.role, content=turn.content) for turn in turns]


def to_response(delta: Delta) -> router_pb2.RouterGenerateResponse:
    """What a client is sent for a delta."""
    if delta.finish is None:
        return router_pb2.RouterGenerateResponse(text=delta.text, token_ids=delta.token_ids)
    return router_pb2.RouterGenerateResponse(
        text=delta.text,
        token_ids=delta.token_ids,
        finish_reason=_TO_PROTO[delta.finish.reason],
        usage=to_usage(delta.finish.usage),
        stop_match=delta.finish.stop_match,
    )


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
    )


def to_load(load: Load) -> worker_pb2.LoadReport:
    """A load as a message."""
    return worker_pb2.LoadReport(
        running_requests=load.running_requests,
        waiting_requests=load.waiting_requests,
        queued_tokens=load.queued_tokens,
        used_pages=load.used_pages,
        evictable_pages=load.evictable_pages,
        num_pages=load.num_pages,
        prompt_tokens=load.prompt_tokens,
        cached_tokens=load.cached_tokens,
    )


def to_options(stop: tuple[str, ...], skip_special_tokens: bool) -> tokenizer_pb2.DetokenizeOptions:
    """The options that open a detokenizer stream."""
    return tokenizer_pb2.DetokenizeOptions(stop=stop, skip_special_tokens=skip_special_tokens)
