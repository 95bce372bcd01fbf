"""The model that a worker serves, and its description for routers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from sapwood.v1 import common_pb2, worker_pb2
from sapwood_common.errors import InvalidArgumentError, UnimplementedError
from sapwood_common.grammar.artefact import ArtefactError, GrammarArtefact
from sapwood_common.grammar.compiler import CompilerLimits, GrammarCompiler
from sapwood_common.grammar.convert import to_grammar
from sapwood_worker.front.convert import from_activation, from_pooling, from_role
from sapwood_worker.records.model_info import ModelInfo
from sapwood_worker.settings import Role

# A request's grammar in the form that the scheduler takes; one that comes as a bare source is compiled here.


class RequestGrammars:
    """Reads the grammars of requests. Lives on one event loop.

    Args:
        info: The model.
        limits: Bounds on local compilation.
    """

    def __init__(self, info: ModelInfo, limits: CompilerLimits) -> None:
        self._fingerprint = info.vocabulary_fingerprint
        self._compiler = GrammarCompiler(info.vocabulary_fingerprint, info.special_tokens, limits)

    async def compiled(self, request: worker_pb2.WorkerGenerateRequest, time_remaining: float | None) -> bytes:
        """The serialised artefact of the request's grammar; empty if it has none.

        Args:
            request: The request.
            time_remaining: Seconds to the caller's deadline, if it has one.

        Raises:
            InvalidArgumentError: The grammar or what comes with it is at fault; the field is named.
            DeadlineExceededError: It could not be compiled in time.
            UnimplementedError: This worker has no vocabulary.
        """
        if not request.HasField("grammar"):
            return b""
        if request.sampling.min_tokens:
            raise InvalidArgumentError(
                "sampling.min_tokens cannot be combined with a grammar: where that is complete, only an end may follow",
                field="sampling.min_tokens",
            )
        if request.sampling.ignore_eos:
            raise InvalidArgumentError(
                "sampling.ignore_eos cannot be combined with a grammar: where that is complete, only an end may follow",
                field="sampling.ignore_eos",
            )
        if not self._fingerprint:
            raise UnimplementedError("this worker serves no structured output", field="grammar")
        grammar = to_grammar(request.grammar)
        if not isinstance(grammar, bytes):
            return await self._compiler.compile(replace(grammar, salt=request.cache_salt), time_remaining)
        try:
            artefact = GrammarArtefact.from_bytes(grammar)
        except ArtefactError as error:
            raise InvalidArgumentError(f"grammar.compiled: {error}", field="grammar.compiled") from error
        if artefact.fingerprint != self._fingerprint:
            raise InvalidArgumentError(
                "grammar.compiled is for another vocabulary than this model's", field="grammar.compiled"
            )
        if not artefact.current:  # a tokenizer of another version has compiled it
            return await self._compiler.compile(replace(artefact.source, salt=request.cache_salt), time_remaining)
        return grammar

    async def close(self) -> None:
        """Ends local compilations."""
        await self._compiler.close()


class ServedModel(NamedTuple):
    """The served model: its public name, its facts, the scheduler's epoch, and a compiler of grammars."""

    name: str
    info: ModelInfo
    epoch: int
    grammars: RequestGrammars
    max_running: int


def to_model_info(
    model: ServedModel,
    role: Role,
    page_fingerprint: bytes,
    *,
    resolves_loras: bool = False,
    weights: worker_pb2.WeightsState | None = None,
    asleep: Iterable[worker_pb2.Memory] = (),
) -> worker_pb2.GetModelInfoResponse:
    """The message that describes a model, and what the worker does of requests for it.

    Args:
        model: The model.
        role: The worker's role now.
        page_fingerprint: A hash of everything besides tokens that pages depend on; empty: the model's facts have it, if it is
            known.
        resolves_loras: Whether it looks for adapters that requests name and it does not know.
        weights: Those in use.
        asleep: What sleeps.
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
        lora_slots=info.lora_slots,
        max_lora_rank=info.max_lora_rank,
        resolves_loras=resolves_loras,
        weights_in_use=weights,
        vision="" if info.pictures is None else info.pictures.family,
        most_picture_bytes=0 if info.pictures is None else info.pictures.most_bytes,
        asleep=asleep,
    )
