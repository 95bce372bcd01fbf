"""Between protobuf and the worker's own types; requests are validated here."""

from __future__ import annotations

import math
import secrets
from array import array

from sapwood.v1 import common_pb2, worker_pb2
from sapwood_common.errors import InvalidArgumentError
from sapwood_common.telemetry import is_valid_request_id
from sapwood_worker.cache.kv_events import BlockRemoved, BlockStored, KvEvent, Medium, split_hashes
from sapwood_worker.kv_event_stream import KvEventBatch, KvEventStream
from sapwood_worker.model_info import ModelInfo
from sapwood_worker.sampling.params import SamplingParams
from sapwood_worker.scheduler.load import Load
from sapwood_worker.scheduler.output import RequestOutput

_FINISH = {
    "stop": common_pb2.FINISH_REASON_STOP,
    "length": common_pb2.FINISH_REASON_LENGTH,
}


_MEDIUM: dict[Medium, worker_pb2.KvMedium] = {
    "GPU": worker_pb2.KV_MEDIUM_GPU,
    "CPU_TIER1": worker_pb2.KV_MEDIUM_CPU_TIER1,
    "CPU_TIER2": worker_pb2.KV_MEDIUM_CPU_TIER2,
}


def check_prompt(request: worker_pb2.WorkerGenerateRequest, info: ModelInfo) -> None:
    """Raises InvalidArgumentError naming ``request_id`` or ``token_ids`` if the prompt cannot be run."""
    if not request.request_id:
        raise InvalidArgumentError("request_id is missing", field="request_id")
    if not is_valid_request_id(request.request_id):
        raise InvalidArgumentError("request_id is not 1 to 128 plain characters", field="request_id")
    if not request.token_ids:
        raise InvalidArgumentError("token_ids is empty: there is no prompt", field="token_ids")
    largest = max(request.token_ids)
    if largest >= info.vocab_size:
        raise InvalidArgumentError(
            f"token id {largest} is not below the vocabulary size {info.vocab_size}", field="token_ids"
        )
    if len(request.token_ids) >= info.context_length:
        raise InvalidArgumentError(
            f"prompt of {len(request.token_ids)} tokens leaves no room in the context of {info.context_length} tokens",
            field="token_ids",
        )


def to_sampling(request: worker_pb2.WorkerGenerateRequest, info: ModelInfo) -> SamplingParams:
    """The sampling settings with their defaults filled in; an absent seed is drawn at random.

    Raises:
        InvalidArgumentError: A setting is out of range; its field is named.
    """
    given = request.sampling
    room = info.context_length - len(request.token_ids)
    temperature = given.temperature if given.HasField("temperature") else 1.0
    top_p = given.top_p if given.HasField("top_p") else 1.0
    min_p = given.min_p if given.HasField("min_p") else 0.0
    _require(math.isfinite(temperature) and temperature >= 0, "temperature", temperature, "at least 0")
    _require(0 < top_p <= 1, "top_p", top_p, "in (0, 1]")
    _require(0 <= min_p <= 1, "min_p", min_p, "in [0, 1]")
    if given.HasField("top_k"):
        _require(given.top_k >= 1, "top_k", given.top_k, "at least 1")
    if given.HasField("max_tokens"):
        _require(given.max_tokens >= 1, "max_tokens", given.max_tokens, "at least 1")
    for token in given.stop_token_ids:
        _require(token < info.vocab_size, "stop_token_ids", token, f"below the vocabulary size {info.vocab_size}")
    return SamplingParams(
        temperature=temperature,
        top_k=given.top_k if given.HasField("top_k") else 0,
        top_p=top_p,
        min_p=min_p,
        seed=given.seed if given.HasField("seed") else secrets.randbits(64),
        max_tokens=min(room, given.max_tokens) if given.HasField("max_tokens") else room,
        stop_token_ids=tuple(given.stop_token_ids),
        ignore_eos=given.ignore_eos,
    )


# A request's end token, be it the model's or one of stop_token_ids, is part of token_ids and counted in the usage: a client
# that resumes from what it got then has all of it. Whoever turns tokens into text skips it.
def to_response(output: RequestOutput) -> worker_pb2.WorkerGenerateResponse:
    """One message of the answer; the first and the last carry the usage, the last the finish reason."""
    response = worker_pb2.WorkerGenerateResponse(token_ids=output.token_ids)
    if output.finish_reason is not None:
        response.finish_reason = _FINISH[output.finish_reason]
    if output.finish_reason is not None or output.completion_tokens == len(output.token_ids):
        response.usage.prompt_tokens = output.prompt_tokens
        response.usage.completion_tokens = output.completion_tokens
        response.usage.cached_tokens = output.cached_tokens
    return response


def to_load_report(load: Load, kv: KvEventStream) -> worker_pb2.LoadReport:
    """The load as a message."""
    return worker_pb2.LoadReport(
        running_requests=load.running_requests,
        waiting_requests=load.waiting_requests,
        queued_tokens=load.queued_tokens,
        used_pages=load.used_pages,
        evictable_pages=load.evictable_pages,
        num_pages=load.num_pages,
        prompt_tokens=load.prompt_tokens,
        cached_tokens=load.cached_tokens,
        epoch=kv.epoch,
        kv_seq=kv.seq,
        kv_digest=kv.digest,
    )


def to_kv_events(batch: KvEventBatch, block_size: int, *, token_ids: bool) -> worker_pb2.SubscribeKvEventsResponse:
    """A batch of KV events as a message; ``token_ids``: whether stored blocks come with their tokens."""
    return worker_pb2.SubscribeKvEventsResponse(
        epoch=batch.epoch,
        seq=batch.seq,
        events=[_to_kv_event(event, block_size, token_ids) for event in batch.events],
        snapshot=batch.snapshot,
        more=batch.more,
        digest=batch.digest,
    )


def _to_kv_event(event: KvEvent, block_size: int, token_ids: bool) -> worker_pb2.KvEvent:
    match event:
        case BlockStored():
            stored = worker_pb2.BlockStored(
                block_hashes=split_hashes(event.hashes),
                parent_hash=event.parent,
                token_ids=array("I", event.token_ids) if token_ids else (),
                block_size=block_size,
                medium=_MEDIUM[event.medium],
                lora_name=event.lora,
            )
            return worker_pb2.KvEvent(block_stored=stored)
        case BlockRemoved(hashes, medium):
            removed = worker_pb2.BlockRemoved(block_hashes=split_hashes(hashes), medium=_MEDIUM[medium])
            return worker_pb2.KvEvent(block_removed=removed)
        case _:
            return worker_pb2.KvEvent(all_blocks_cleared=worker_pb2.AllBlocksCleared())


def _require(condition: bool, name: str, value: float, expected: str) -> None:
    if not condition:
        raise InvalidArgumentError(f"sampling.{name} is {value:g}; it must be {expected}", field=f"sampling.{name}")
