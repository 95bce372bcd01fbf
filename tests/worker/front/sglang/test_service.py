"""SGLang's protocol at a real worker, by the stubs of its own package."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2, sglang_scheduler_pb2, sglang_scheduler_pb2_grpc

from sapwood.v1 import common_pb2 as sapwood_pb2
from sapwood.v1 import worker_pb2, worker_pb2_grpc
from sapwood_common.contract.seeds import RANDOM_SEEDS
from sapwood_common.errors import UnimplementedError
from sapwood_worker.config import WorkerConfig
from sapwood_worker.front.convert import to_sampling
from sapwood_worker.front.served_model import ServedModel
from sapwood_worker.front.sglang.service import SglangService, tokenizer_bundle
from sapwood_worker.front.sglang.sglang_convert import to_generate
from sapwood_worker.records.model_info import ModelInfo

FLAGS = ("--sglang", "--num-pages", "512")
PROMPT = list(range(5, 45))


@pytest.fixture
async def channel(lend: Any) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(lend(*FLAGS).address) as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> Any:
    return sglang_scheduler_pb2_grpc.SglangSchedulerStub(channel)


def sampling(**given: Any) -> sglang_scheduler_pb2.SamplingParams:
    usual = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "max_new_tokens": 6, "n": 1}
    result = sglang_scheduler_pb2.SamplingParams(**(usual | given))
    if "custom_params" not in given:
        result.custom_params.update({"sampling_seed": 11})
    return result


def request(name: str, params: Any = None, **given: Any) -> sglang_scheduler_pb2.GenerateRequest:
    tokenized = sglang_scheduler_pb2.TokenizedInput(input_ids=PROMPT)
    usual = {"tokenized": tokenized, "sampling_params": params or sampling(), "stream": True, "logprob_start_len": -1}
    return sglang_scheduler_pb2.GenerateRequest(request_id=name, **(usual | given))


async def own_tokens(channel: grpc.aio.Channel, **given: Any) -> list[int]:
    settings = sapwood_pb2.SamplingParams(**({"max_tokens": 6, "seed": 11} | given))
    call = worker_pb2_grpc.WorkerStub(channel).Generate(
        worker_pb2.WorkerGenerateRequest(request_id="own", token_ids=PROMPT, sampling=settings)
    )
    return [token async for response in call for token in response.token_ids]


async def test_a_stream_has_the_workers_own_tokens_and_ends_with_all_of_them(stub: Any, channel: Any) -> None:
    *chunks, last = [each async for each in stub.Generate(request("s1"))]
    tokens = [token for each in chunks for token in each.chunk.token_ids]
    assert tokens == await own_tokens(channel) == list(last.complete.output_ids)
    assert (last.complete.finish_reason, last.complete.prompt_tokens, last.complete.completion_tokens) == (
        "length",
        len(PROMPT),
        6,
    )


async def test_without_a_stream_one_message_has_everything(stub: Any, channel: Any) -> None:
    (only,) = [each async for each in stub.Generate(request("s2", stream=False))]
    assert list(only.complete.output_ids) == await own_tokens(channel)
    assert only.request_id == "s2"


async def test_the_token_that_ended_it_is_named(stub: Any, channel: Any) -> None:
    tokens = await own_tokens(channel)
    stops = sampling(stop_token_ids=[tokens[2]])
    *_, last = [each async for each in stub.Generate(request("s3", stops))]
    assert last.complete.finish_reason == "stop"
    assert last.complete.matched_token_id == tokens[2]
    assert list(last.complete.output_ids) == tokens[: tokens.index(tokens[2]) + 1]


async def test_continuations_are_told_apart(stub: Any) -> None:
    ended = {
        each.complete.index: list(each.complete.output_ids)
        async for each in stub.Generate(request("s4", sampling(n=3), stream=False))
    }
    assert sorted(ended) == [0, 1, 2]
    assert len({tuple(tokens) for tokens in ended.values()}) > 1


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"lora_id": "mine"}, "lora_id"),
        ({"return_hidden_states": True}, "return_hidden_states"),
        ({"data_parallel_rank": 1}, "data_parallel_rank"),
        ({"custom_logit_processor": "x"}, "custom_logit_processor"),
    ],
)
async def test_what_is_not_served_is_refused_by_name(stub: Any, given: Any, field: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=field) as caught:
        [each async for each in stub.Generate(request("s5", **given))]
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"logit_bias": {"cat": 1.0}}, "logit_bias"),
        ({"max_new_tokens": 0}, "max_tokens"),
    ],
)
async def test_a_value_out_of_range_is_refused_by_name(stub: Any, params: Any, field: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=field) as caught:
        [each async for each in stub.Generate(request("s6", sampling(**params)))]
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_rank_0_and_empty_media_are_what_there_is(stub: Any) -> None:
    given = {"data_parallel_rank": 0, "mm_inputs": sglang_scheduler_pb2.MultimodalInputs()}
    assert [each async for each in stub.Generate(request("s7", **given))]


async def test_a_request_is_aborted_by_its_id(stub: Any) -> None:
    call = stub.Generate(request("s8", sampling(max_new_tokens=4000)))
    await anext(aiter(call))
    assert (await stub.Abort(sglang_scheduler_pb2.AbortRequest(request_id="s8"))).success
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [each async for each in call]
    assert caught.value.code() is grpc.StatusCode.CANCELLED
    assert not (await stub.Abort(sglang_scheduler_pb2.AbortRequest(request_id="s8"))).success


async def test_a_worker_describes_itself(stub: Any) -> None:
    assert (await stub.HealthCheck(sglang_scheduler_pb2.HealthCheckRequest())).healthy
    info = await stub.GetModelInfo(sglang_scheduler_pb2.GetModelInfoRequest())
    assert info.is_generation
    assert info.max_req_input_len == info.max_context_length - 1
    server = await stub.GetServerInfo(sglang_scheduler_pb2.GetServerInfoRequest())
    assert server.server_args["page_size"] * 512 == server.max_total_num_tokens
    (load,) = (await stub.GetLoads(sglang_scheduler_pb2.GetLoadsRequest())).loads
    assert load.max_total_num_tokens == server.max_total_num_tokens
    assert not (await stub.ListLoadedLoRAAdapters(sglang_scheduler_pb2.ListLoadedLoRAAdaptersRequest())).loaded_adapters


async def test_the_models_own_sampling_is_told_and_minus_1_keeps_all_tokens() -> None:
    info = ModelInfo(
        architecture="test",
        dtype="none",
        context_length=64,
        vocab_size=1000,
        eos_token_ids=(2,),
        page_size=4,
        num_pages=32,
        sampling_defaults={"top_k": 20, "temperature": 0.6},
    )
    worker = cast(Any, SimpleNamespace(loaded=lambda: ServedModel("m", info, 1, cast(Any, None), 4)))
    service = SglangService(worker, cast(Any, None), WorkerConfig(model="/m.gguf"), asyncio.Event())
    told = await service.GetModelInfo(sglang_scheduler_pb2.GetModelInfoRequest(), cast(Any, None))
    assert json.loads(told.default_sampling_params_json) == {"top_k": 20, "temperature": 0.6}
    for given, kept in ((-1, 0), (0, 20), (7, 7)):
        asked = to_generate(request("s10", sampling(top_k=given)))
        assert to_sampling(asked, info, RANDOM_SEEDS)[0].top_k == kept


async def test_a_subscriber_hears_of_what_is_cached(stub: Any) -> None:
    assert (await stub.FlushCache(common_pb2.FlushCacheRequest())).success
    call = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(start_sequence_number=41))
    first = await call.read()
    assert first.sequence_number == 42
    assert first.events[0].HasField("cleared")
    [each async for each in stub.Generate(request("s9"))]
    batches = [await call.read()]
    while not any(event.HasField("stored") for event in batches[-1].events):  # that of the flush may come first
        batches.append(await call.read())
    assert [batch.sequence_number for batch in batches] == list(range(43, 43 + len(batches)))
    stored = [event.stored for event in batches[-1].events if event.HasField("stored")]
    blocks = [block for event in stored for block in event.blocks]
    assert [token for block in blocks for token in block.token_ids] == PROMPT[: len(blocks) * blocks[0].block_size]
    assert all(event.tier == common_pb2.KV_CACHE_TIER_DEVICE for event in stored)
    call.cancel()


async def test_a_single_file_has_no_tokenizer_to_send(stub: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="--sglang on,tokenizer=") as caught:
        [each async for each in stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_bundle_has_the_tokenizers_files_and_no_weights(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "config.json", "model.safetensors"):
        (tmp_path / name).write_text(name)
    data = tokenizer_bundle(tmp_path)
    assert zipfile.ZipFile(io.BytesIO(data)).namelist() == ["config.json", "tokenizer.json"]
    assert hashlib.sha256(data).digest() == hashlib.sha256(tokenizer_bundle(tmp_path)).digest()


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnimplementedError, match=tmp_path.name):
        tokenizer_bundle(tmp_path)
