"""Turns requests to workers into messages, and their messages into plain values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from sapwood.v1 import common_pb2, worker_pb2
from sapwood_common.contract.page_hash import WEIGHTS_BYTES
from sapwood_common.contract.sampling import OF_MODELS, SamplingParams
from sapwood_common.contract.sampling_message import to_message
from sapwood_router.fleet.loras import WorkerLora
from sapwood_router.fleet.served_model import Role, ServedModel
from sapwood_router.request.context import FinishReason, Likelihoods, Picture, TokenLogprobs
from sapwood_router.request.embed_request import EmbedRequest, Labels
from sapwood_router.routing.worker_view import Load
from sapwood_router.transport.held_tickets import HeldTicket


class WorkerOutput(msgspec.Struct):
    """What one message from a worker adds to a request.

    Attributes:
        token_ids: New tokens; an end token is among them.
        finish: Why the generation ended, on the last one.
        logprobs, prompt_logprobs: As asked for: one for each of the tokens; one for each of the prompt's but the first.
        cached_tokens: Prompt tokens found in the worker's prefix cache, where the message says.
        accepted_prediction_tokens, rejected_prediction_tokens: Drafted tokens that were and were not output so far; the same.
        announced: Pages of the prompt that another worker may read already; the ticket names them again.
        position: How many tokens of the worker's output came before ``token_ids``; None: it does not say.
        total: How many tokens its output has, on the last one; None: it does not say.
        lora_digest: Of the request's adapter, where the message says it.
        weight_version: What the weights are called that have computed the tokens; empty: those of the message before.
        ticket: The worker is done with the prompt, and another is to continue; anybody who takes this releases it.
    """

    token_ids: Sequence[int]
    finish: FinishReason | None = None
    cached_tokens: int | None = None
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[Likelihoods] = ()
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    announced: HeldTicket | None = None
    ticket: HeldTicket | None = None
    position: int | None = None
    total: int | None = None
    lora_digest: bytes = b""
    weight_version: str = ""


_LONGEST_VERSION = 128
_FROM_PROTO = {
    common_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    common_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    common_pb2.FINISH_REASON_ABORT: FinishReason.ABORT,
}


def to_worker_request(
    request_id: str, token_ids: Sequence[int], sampling: SamplingParams
) -> worker_pb2.WorkerGenerateRequest:
    """The worker's request for a prompt."""
    return worker_pb2.WorkerGenerateRequest(request_id=request_id, token_ids=token_ids, sampling=to_message(sampling))


def add_pictures(request: worker_pb2.WorkerGenerateRequest, pictures: Iterable[Picture]) -> None:
    """Adds the pictures of the prompt."""
    for each in pictures:
        tiles, height, width = each.shape
        request.pictures.add(
            offset=each.span.offset,
            length=each.span.length,
            digest=each.span.digest,
            tiles=tiles,
            height=height,
            width=width,
            layout=each.layout,
            pixels=each.pixels,
        )


def pack(token_ids: Sequence[int]) -> bytes:
    """Some tokens of a prompt, as an encoded ``SessionSubmit``. Several in a row are read as one message with all tokens."""
    more = worker_pb2.SessionSubmit(request=worker_pb2.WorkerGenerateRequest(token_ids=token_ids))
    return more.SerializeToString()


def worker_output_of(message: worker_pb2.WorkerGenerateResponse) -> WorkerOutput:
    """A worker's message as plain values."""
    output = WorkerOutput(
        token_ids=message.token_ids[:],
        finish=_FROM_PROTO.get(message.finish_reason),
        logprobs=_logprobs_of(message.logprobs) if message.logprobs else (),
        prompt_logprobs=message.prompt_logprobs,
        weight_version=message.weight_version[:_LONGEST_VERSION],
    )
    if message.HasField("position"):
        output.position = message.position
    if message.HasField("usage"):
        usage = message.usage
        if output.finish is not None and usage.completion_tokens:
            output.total = usage.completion_tokens
        output.lora_digest = message.lora_digest
        output.cached_tokens = usage.cached_tokens
        output.accepted_prediction_tokens = usage.accepted_prediction_tokens
        output.rejected_prediction_tokens = usage.rejected_prediction_tokens
    return output


def _logprobs_of(messages: Iterable[worker_pb2.TokenLogprobs]) -> list[TokenLogprobs]:
    return [TokenLogprobs(item.logprob, tuple(item.top_ids), tuple(item.top_logprobs)) for item in messages]


_POOLING = {
    None: worker_pb2.POOLING_UNSPECIFIED,
    "mean": worker_pb2.POOLING_MEAN,
    "last": worker_pb2.POOLING_LAST,
    "cls": worker_pb2.POOLING_CLS,
}
_ACTIVATION: dict[worker_pb2.Activation, Literal["softmax", "sigmoid"]] = {
    worker_pb2.ACTIVATION_SOFTMAX: "softmax",
    worker_pb2.ACTIVATION_SIGMOID: "sigmoid",
}


def to_embed_request(
    request: EmbedRequest, sequences: Iterable[list[int]], max_tokens: int
) -> worker_pb2.WorkerEmbedRequest:
    """The worker's request for embeddings or labels of token sequences, cut to this many tokens, or 0."""
    caller = request.caller
    return worker_pb2.WorkerEmbedRequest(
        request_id=request.request_id,
        inputs=[common_pb2.TokenIds(ids=sequence) for sequence in sequences],
        pooling=worker_pb2.POOLING_LABELS if request.classifies else _POOLING[request.pooling],
        normalize=request.normalize,
        priority=caller.priority,
        tenant=caller.tenant,
        cache_salt=caller.cache_salt,
        dimensions=request.dimensions or 0,
        max_tokens=max_tokens,
    )


_ROLE = {worker_pb2.WORKER_ROLE_PREFILL: Role.PREFILL, worker_pb2.WORKER_ROLE_DECODE: Role.DECODE}


def served_model_of(message: worker_pb2.GetModelInfoResponse) -> ServedModel:
    """The model that a worker serves, from its own answer."""
    labels = Labels(tuple(message.labels), _ACTIVATION.get(message.activation, "none")) if message.labels else None
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
        labels=labels,
        role=_ROLE.get(message.role, Role.BOTH),
        pages=message.page_fingerprint,
        sampling_defaults={
            # A float of 32 bits as it was written: 0.95, not 0.949999988.
            each.name: float(f"{value:.7g}") if isinstance(value, float) else value
            for each, value in message.sampling_defaults.ListFields()
            if each.name in OF_MODELS
        },
        lora_slots=message.lora_slots,
        resolves_loras=message.resolves_loras,
        weights=message.weights_in_use.digest if len(message.weights_in_use.digest) == WEIGHTS_BYTES else b"",
        weight_version=message.weights_in_use.version[:_LONGEST_VERSION],
        asleep=bool(message.asleep),
    )


def worker_loras_of(message: worker_pb2.LoraReport) -> list[WorkerLora]:
    """A worker's adapters, from its own report."""
    there = (worker_pb2.LORA_PLACE_HOST, worker_pb2.LORA_PLACE_DEVICE)
    return [WorkerLora(each.name, each.path, each.version, each.digest, each.place in there) for each in message.loras]


_LOAD = frozenset(Load.__struct_fields__)


def load_of(message: worker_pb2.LoadReport) -> Load:
    """A worker's report as plain values."""
    return Load(**{field.name: value for field, value in message.ListFields() if field.name in _LOAD})
