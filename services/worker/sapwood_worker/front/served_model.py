"""The model that a worker serves, and what it says of it."""

from __future__ import annotations

from typing import Any, NamedTuple

from sapwood.v1 import common_pb2, worker_pb2
from sapwood_worker.front.convert import from_activation, from_pooling, from_role
from sapwood_worker.front.request_grammars import RequestGrammars
from sapwood_worker.records.model_info import ModelInfo
from sapwood_worker.settings.names import Role


class ServedModel(NamedTuple):
    """What is served: its public name, facts about the model, the scheduler's start (epoch), and a compiler of grammars."""

    name: str
    info: ModelInfo
    epoch: int
    grammars: RequestGrammars
    max_running: int


def to_model_info(model: ServedModel, role: Role, page_fingerprint: bytes) -> worker_pb2.GetModelInfoResponse:
    """The message that describes a model, and what the worker does of requests for it.

    Args:
        model: The model.
        role: The worker's role now.
        page_fingerprint: What pages hold besides tokens; empty: as the model's facts say, which may not know either.
    """
    info = model.info
    defaults: dict[str, Any] = {**info.sampling_defaults}
    return worker_pb2.GetModelInfoResponse(
        model=model.name,
        architecture=info.architecture,
        dtype=info.dtype,
        context_length=info.context_length,
        vocab_size=info.vocab_size,
        eos_token_ids=info.eos_token_ids,
        page_size=info.page_size,
        num_pages=info.num_pages,
        epoch=model.epoch,
        embedding_size=info.embedding_size,
        pooling=from_pooling(info),
        embeds_only=not info.generates,
        embedded_tokens=info.embedded_tokens,
        shortens_embeddings=info.shortened is not None,
        embedding_dimensions=info.shortened or (),
        prefill_attention=info.prefill_attention,
        decode_attention=info.decode_attention,
        attention_reason=info.attention_reason,
        tensor_parallel=info.tensor_parallel,
        pipeline_parallel=info.pipeline_parallel,
        all_reduce=info.all_reduce.told,
        attention_ranks=info.attention_ranks,
        page_fingerprint=page_fingerprint or info.page_fingerprint,
        weights=info.weights,
        logit_processors=info.logit_processors,
        max_running=model.max_running,
        max_step_tokens=info.max_step_tokens,
        sizes_reason=info.sizes_reason,
        speculate=info.speculate,
        labels=info.labels.names if info.labels is not None else (),
        activation=from_activation(info),
        role=from_role(role),
        sampling_defaults=common_pb2.SamplingParams(**defaults),
    )
