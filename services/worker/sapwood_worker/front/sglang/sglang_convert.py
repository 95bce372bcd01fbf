"""Converts between SGLang's messages (``sglang.grpc.scheduler``) and those of ``sapwood.v1.Worker``."""

from __future__ import annotations

from typing import Any

from smg_grpc_proto.generated import common_pb2, sglang_scheduler_pb2

from sapwood.v1 import common_pb2 as sapwood_pb2
from sapwood.v1 import worker_pb2
from sapwood_common.errors import InvalidArgumentError, UnimplementedError
from sapwood_worker.front.kv_event_stream import KvEventBatch
from sapwood_worker.records.kv_events import BlockRemoved, BlockStored, KvEvent, Medium, split_hashes
from sapwood_worker.records.output import RequestOutput, TokenLogprobs

_UNSERVED = frozenset(
    {
        "mm_inputs",
        "token_ids_logprob",
        "return_hidden_states",
        "disaggregated_params",
        "custom_logit_processor",
        "input_embeds",
        "lora_id",
        "data_parallel_rank",
        "is_cross_encoder",
        "texts",
        "token_type_ids",
    }
)
_GRAMMARS = {"regex": "regex", "json_schema": "json_schema", "ebnf_grammar": "ebnf", "structural_tag": "structural_tag"}
_SEEDS = ("sampling_seed", "seed")

_TIER: dict[Medium, tuple[Any, str]] = {
    "GPU": (common_pb2.KV_CACHE_TIER_DEVICE, "GPU"),
    "CPU_TIER1": (common_pb2.KV_CACHE_TIER_HOST, "CPU_PINNED"),
    "CPU_TIER2": (common_pb2.KV_CACHE_TIER_EXTERNAL, "EXTERNAL"),
}


def to_generate(request: sglang_scheduler_pb2.GenerateRequest) -> worker_pb2.WorkerGenerateRequest:
    """The request as our own; whether its values are in range is the worker's service's to say.

    Strings to stop at stay the gateway's matter, as all text does: a worker knows tokens only.

    Raises:
        UnimplementedError: It asks for what this worker does not serve; the field is named.
        InvalidArgumentError: A value cannot be read; the field is named.
    """
    _refuse_unserved(request)
    result = worker_pb2.WorkerGenerateRequest(
        request_id=request.request_id,
        token_ids=request.tokenized.input_ids,
        sampling=_to_sampling(request.sampling_params),
    )
    if request.return_logprob:
        result.sampling.logprobs = max(request.top_logprobs_num, 0)
        if _wants_prompt(request):
            result.sampling.prompt_logprobs = result.sampling.logprobs
            result.sampling.prompt_logprobs_start = max(request.logprob_start_len - 1, 0)
    constraint = request.sampling_params.WhichOneof("constraint")
    if constraint is not None:
        setattr(result.grammar, _GRAMMARS[constraint], getattr(request.sampling_params, constraint))
    return result


def to_embed(request: sglang_scheduler_pb2.EmbedRequest) -> worker_pb2.WorkerEmbedRequest:
    """The request as our own. Raises as :func:`to_generate`."""
    _refuse_unserved(request)
    inputs = [sapwood_pb2.TokenIds(ids=request.tokenized.input_ids)]
    return worker_pb2.WorkerEmbedRequest(request_id=request.request_id, inputs=inputs)


class Answers:
    """The answers to one request, message by message.

    Args:
        request: The request.
        ends: Tokens at which it may end.
    """

    def __init__(self, request: sglang_scheduler_pb2.GenerateRequest, ends: frozenset[int]) -> None:
        self._request = request
        self._ends = ends
        # For each continuation, the tokens generated so far: the last message repeats them all.
        self._token_ids: dict[int, list[int]] = {}
        self._logprobs: dict[int, list[TokenLogprobs]] = {}
        self._prompt: sglang_scheduler_pb2.InputLogProbs | None = None

    def of(self, output: RequestOutput) -> list[sglang_scheduler_pb2.GenerateResponse]:
        """The messages for what is new: the new tokens if they are to be streamed, and all of them at the end."""
        request, streams = self._request, self._request.stream
        token_ids = self._token_ids.setdefault(output.index, [])
        logprobs = self._logprobs.setdefault(output.index, [])
        token_ids += output.token_ids
        logprobs += output.logprobs
        prompt = None
        if output.prompt_logprobs:
            prompt = self._prompt = _to_input_logprobs(request, output.prompt_logprobs)
        usage = {
            "prompt_tokens": output.prompt_tokens,
            "completion_tokens": output.completion_tokens,
            "cached_tokens": output.cached_tokens,
            "index": output.index,
        }
        messages = []
        if streams and output.token_ids:
            chunk = sglang_scheduler_pb2.GenerateStreamChunk(
                token_ids=output.token_ids,
                output_logprobs=_to_output_logprobs(output.token_ids, output.logprobs),
                input_logprobs=prompt,
                **usage,
            )
            messages.append(sglang_scheduler_pb2.GenerateResponse(request_id=request.request_id, chunk=chunk))
        if output.finish_reason is not None:
            complete = sglang_scheduler_pb2.GenerateComplete(
                output_ids=token_ids,
                finish_reason=output.finish_reason,
                output_logprobs=_to_output_logprobs(token_ids, logprobs),
                input_logprobs=self._prompt if output.index == 0 else None,
                **usage,
            )
            if output.finish_reason == "stop" and token_ids and token_ids[-1] in self._ends:
                complete.matched_token_id = token_ids[-1]
            messages.append(sglang_scheduler_pb2.GenerateResponse(request_id=request.request_id, complete=complete))
        return messages


def to_kv_batch(batch: KvEventBatch, number: int, block_size: int) -> common_pb2.KvEventBatch:
    """A batch of KV events as a message of this number."""
    return common_pb2.KvEventBatch(
        sequence_number=number, events=[_to_kv_event(event, block_size) for event in batch.events]
    )


def _refuse_unserved(request: Any) -> None:
    for field, value in request.ListFields():
        if field.name in _UNSERVED and value != 0 and not (field.name == "mm_inputs" and not value.ByteSize()):
            raise UnimplementedError(f"this worker does not serve {field.name}", field=field.name)


def _to_sampling(given: sglang_scheduler_pb2.SamplingParams) -> sapwood_pb2.SamplingParams:
    """SGLang's settings as ours. The message cannot say that a field is absent: a 0 that makes no sense is taken for that."""
    result = sapwood_pb2.SamplingParams(
        temperature=given.temperature,
        top_k=max(given.top_k, 0) if given.top_k else None,  # 0 of ours keeps all, whatever the model's own is
        top_p=given.top_p or None,
        min_p=given.min_p or None,
        frequency_penalty=given.frequency_penalty or None,
        presence_penalty=given.presence_penalty or None,
        repetition_penalty=given.repetition_penalty or None,
        max_tokens=given.max_new_tokens if given.HasField("max_new_tokens") else None,
        min_tokens=given.min_new_tokens or None,
        stop_token_ids=given.stop_token_ids,
        ignore_eos=given.ignore_eos or None,
        n=given.n or None,
    )
    for token, bias in given.logit_bias.items():
        if not token.isdecimal():
            raise InvalidArgumentError(
                f"logit_bias names {token!r}, not a token id", field="sampling_params.logit_bias"
            )
        result.logit_bias[int(token)] = bias
    for name, value in given.custom_params.items():
        if name not in _SEEDS or not isinstance(value, float) or not 0 <= value < 2**53 or value % 1:
            field = f"sampling_params.custom_params.{name}"
            raise UnimplementedError("of custom_params only a whole seed is served", field=field)
        result.seed = int(value)
    return result


def _wants_prompt(request: sglang_scheduler_pb2.GenerateRequest) -> bool:
    return bool(0 <= request.logprob_start_len < len(request.tokenized.input_ids))


def _to_top(given: TokenLogprobs) -> sglang_scheduler_pb2.TopLogProbs:
    return sglang_scheduler_pb2.TopLogProbs(values=given.top_logprobs, token_ids=given.top_ids)


def _to_output_logprobs(token_ids: list[int], given: list[TokenLogprobs]) -> sglang_scheduler_pb2.OutputLogProbs | None:
    if not given:
        return None
    return sglang_scheduler_pb2.OutputLogProbs(
        token_logprobs=[each.logprob for each in given], token_ids=token_ids, top_logprobs=map(_to_top, given)
    )


def _to_input_logprobs(
    request: sglang_scheduler_pb2.GenerateRequest, given: list[TokenLogprobs]
) -> sglang_scheduler_pb2.InputLogProbs:
    """The prompt's log probabilities from the wanted token on; its first token has none."""
    start = request.logprob_start_len
    result = sglang_scheduler_pb2.InputLogProbs(token_ids=request.tokenized.input_ids[start:])
    if start == 0:
        result.token_logprobs.add()
        result.top_logprobs.add()
    for each in given:
        result.token_logprobs.add(value=each.logprob)
        result.top_logprobs.append(_to_top(each))
    return result


def _to_kv_event(event: KvEvent, block_size: int) -> common_pb2.KvCacheEvent:
    match event:
        case BlockStored():
            tier, medium = _TIER[event.medium]
            token_ids = memoryview(event.token_ids).cast("I")
            blocks = [
                common_pb2.KvBlock(
                    block_hash=_number(each),
                    token_ids=token_ids[index * block_size : (index + 1) * block_size],
                    block_size=block_size,
                )
                for index, each in enumerate(split_hashes(event.hashes))
            ]
            parent = _number(event.parent) if event.parent else None
            stored = common_pb2.KvBlocksStored(blocks=blocks, parent_block_hash=parent, tier=tier, medium=medium)
            return common_pb2.KvCacheEvent(stored=stored)
        case BlockRemoved(hashes, medium_name):
            tier, medium = _TIER[medium_name]
            removed = common_pb2.KvBlocksRemoved(
                block_hashes=map(_number, split_hashes(hashes)), tier=tier, medium=medium
            )
            return common_pb2.KvCacheEvent(removed=removed)
        case _:
            return common_pb2.KvCacheEvent(cleared=common_pb2.KvCacheCleared())


def _number(block_hash: bytes) -> int:
    """SGLang's name of a block: the first 8 bytes of its hash."""
    return int.from_bytes(block_hash[:8], "big", signed=True)
