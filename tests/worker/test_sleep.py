"""Sleep of a worker, in real processes: memory is given back, requests are refused, and answers are equal afterwards."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from sapwood.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from sapwood_testing.models.other_weights import other_checkpoint
from sapwood_testing.models.same_logits import tokens_of
from sapwood_testing.worker.asking import collect
from sapwood_testing.worker.worker_process import StartedWorker, started_worker

WEIGHTS, KV = worker_pb2.MEMORY_WEIGHTS, worker_pb2.MEMORY_KV_CACHE
PAGES = 1024
FLAGS = ("--page-size", "16", "--num-pages", str(PAGES), "--max-running", "16", "--threads", "1", "--lora-slots", "0")
WIDE = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 8}
PROMPT = tokens_of(50)


@pytest.fixture(scope="module")
def model(tiny_model: Any) -> Path:
    path: Path = tiny_model("llama", **WIDE).path
    return path


@pytest.fixture(scope="module")
def worker(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with started_worker(model, tmp_path_factory.mktemp("log") / "log", *FLAGS) as started:
        yield started


@pytest.fixture
async def stub(worker: StartedWorker) -> Any:
    async with grpc.aio.insecure_channel(worker.address) as channel:
        stub: Any = worker_pb2_grpc.WorkerStub(channel)
        await stub.FlushCache(worker_pb2.FlushCacheRequest())  # a prefix from the cache is rounded otherwise
        yield stub
        await stub.WakeUp(worker_pb2.WakeUpRequest())


def ask(name: str, prompt: list[int], count: int = 8) -> worker_pb2.WorkerGenerateRequest:
    sampling = common_pb2.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=0)
    return worker_pb2.WorkerGenerateRequest(request_id=name, token_ids=prompt, sampling=sampling)


async def answer(stub: Any, name: str, count: int = 8) -> tuple[list[int], list[float]]:
    tokens: list[int] = []
    logprobs: list[float] = []
    async for response in stub.Generate(ask(name, PROMPT, count)):
        tokens += response.token_ids
        logprobs += [each.logprob for each in response.logprobs]
    return tokens, logprobs


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), str(caught.value.details())


def resident(worker: StartedWorker) -> int:
    """Bytes of memory that the scheduler process has."""
    for child in Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split():
        if "scheduler_process" in Path(f"/proc/{child}/cmdline").read_text():
            return int(Path(f"/proc/{child}/statm").read_text().split()[1]) * 4096
    raise AssertionError("there is no scheduler process")


async def test_sleep_gives_memory_back_and_the_same_answers_come_afterwards(worker: StartedWorker, stub: Any) -> None:
    for at in range(16):  # every page is touched
        await collect(stub, ask(f"fill{at}", tokens_of(1000, seed=1 + at), 1))
    before, awake = await answer(stub, "before"), resident(worker)
    slept = await stub.Sleep(worker_pb2.SleepRequest())
    assert list(slept.asleep) == [WEIGHTS, KV]
    gone = awake - resident(worker)
    pages = 2 * 4 * PAGES * 16 * 8 * 16 * 4  # keys and values of 4 layers, 8 heads of 16 floats
    assert slept.bytes > pages and gone > 0.9 * slept.bytes, (gone, slept.bytes)
    again = await stub.Sleep(worker_pb2.SleepRequest())
    assert again.bytes == 0 and list(again.asleep) == [WEIGHTS, KV]
    code, words = await refusal(answer(stub, "refused"))
    assert code == grpc.StatusCode.UNAVAILABLE and "sleeps (kv_cache, weights)" in words
    code, words = await refusal(stub.UpdateWeights(iter([worker_pb2.UpdateWeightsRequest(path="/x")])))
    assert code == grpc.StatusCode.UNAVAILABLE and "sleeps" in words
    assert list((await stub.WakeUp(worker_pb2.WakeUpRequest(memory=[WEIGHTS]))).asleep) == [KV]
    assert (await refusal(answer(stub, "half")))[0] == grpc.StatusCode.UNAVAILABLE
    assert list((await stub.GetModelInfo(worker_pb2.GetModelInfoRequest())).asleep) == [KV]
    assert not (await stub.WakeUp(worker_pb2.WakeUpRequest())).asleep
    assert await answer(stub, "after") == before


async def test_weights_are_updated_while_the_cache_sleeps(stub: Any, model: Path, tmp_path: Path) -> None:
    before = await answer(stub, "before")
    await stub.Sleep(worker_pb2.SleepRequest())
    await stub.WakeUp(worker_pb2.WakeUpRequest(memory=[WEIGHTS]))
    other = other_checkpoint(model, tmp_path / "other", 1)
    await stub.UpdateWeights(iter([worker_pb2.UpdateWeightsRequest(path=str(other))]))
    await stub.WakeUp(worker_pb2.WakeUpRequest())
    assert await answer(stub, "other") != before
    await stub.Sleep(worker_pb2.SleepRequest(memory=[WEIGHTS]))
    await stub.WakeUp(worker_pb2.WakeUpRequest())
    await stub.UpdateWeights(iter([worker_pb2.UpdateWeightsRequest(path=str(model))]))
    assert await answer(stub, "again") == before


@pytest.mark.parametrize("abort", [False, True])
async def test_requests_that_run_wait_for_the_end_of_a_sleep_or_end(stub: Any, abort: bool) -> None:
    wanted = await answer(stub, "alone", 200)
    running = asyncio.ensure_future(answer(stub, "running", 200))
    async for report in stub.WatchLoad(worker_pb2.WatchLoadRequest(interval_ms=10)):
        if report.load.running_requests:
            break
    await stub.Sleep(worker_pb2.SleepRequest(memory=[KV], abort=abort))
    if abort:
        tokens, _ = await running
        assert tokens == wanted[0][: len(tokens)] and len(tokens) < 200
        return
    await asyncio.sleep(0.1)
    assert not running.done()
    await stub.WakeUp(worker_pb2.WakeUpRequest())
    assert (await running)[0] == wanted[0]
