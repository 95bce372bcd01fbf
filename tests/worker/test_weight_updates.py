"""Updates of weights under load, in real processes: every token is of the weights that its message names."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from torch import Tensor

from sapwood.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from sapwood_router.routing.policies.base import PromptPages
from sapwood_testing.models.other_weights import other_checkpoint, other_weights
from sapwood_testing.models.same_logits import tokens_of
from sapwood_testing.worker.weight_updates import streamed
from sapwood_testing.worker.worker_process import StartedWorker, started_worker

FLAGS = ("--page-size", "8", "--num-pages", "256", "--max-running", "16", "--threads", "1")
PROMPTS = [tokens_of(9 + 4 * number, seed=number) for number in range(4)]
COUNT = 12


class Answers:
    """What runners that were loaded with each of some weights say, as the oracle."""

    def __init__(self, make_runner: Any, make_driver: Any) -> None:
        self._make_runner, self._make_driver = make_runner, make_driver
        self._runners: dict[Path, Any] = {}

    def __call__(self, path: Path, prompt: list[int], count: int = COUNT) -> list[int]:
        if path not in self._runners:
            self._runners[path] = self._make_runner(path, page_size=8, num_pages=1024)
        driver = self._make_driver(self._runners[path])
        found: list[int] = driver.generate({0: prompt}, count)[0]
        return found


@pytest.fixture(scope="module")
def answers(make_runner: Any, make_driver: Any) -> Answers:
    return Answers(make_runner, make_driver)


@pytest.fixture(scope="module")
def weights(tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The weights of the start, and two others."""
    folder, start = tmp_path_factory.mktemp("weights"), tiny_model("llama").path
    return [start, *(other_checkpoint(start, folder / str(seed), seed) for seed in (1, 2))]


@pytest.fixture(scope="module")
def worker(weights: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    with started_worker(weights[0], tmp_path_factory.mktemp("log") / "log", *FLAGS) as started:
        yield started


@pytest.fixture
async def stub(worker: StartedWorker, weights: list[Path]) -> Any:
    """The worker, which has the weights of the start."""
    async with grpc.aio.insecure_channel(worker.address) as channel:
        stub: Any = worker_pb2_grpc.WorkerStub(channel)
        await stub.UpdateWeights(iter([worker_pb2.UpdateWeightsRequest(path=str(weights[0]), weight_version="start")]))
        yield stub


def ask(name: str, prompt: list[int], count: int = COUNT, **more: Any) -> worker_pb2.WorkerGenerateRequest:
    sampling = common_pb2.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    return worker_pb2.WorkerGenerateRequest(request_id=name, token_ids=prompt, sampling=sampling, **more)


async def said(stub: Any, message: worker_pb2.WorkerGenerateRequest) -> tuple[list[tuple[str, list[int]]], Any]:
    """The tokens of an answer by the weights that computed them, and its last message."""
    found: list[tuple[str, list[int]]] = []
    async for response in stub.Generate(message):
        if response.weight_version:
            found.append((response.weight_version, []))
        found[-1][1].extend(response.token_ids)
    return found, response


def shared_files() -> list[Path]:
    """What updates have left in shared memory."""
    return list(Path("/dev/shm").glob("sapwood-weights-*"))


def children(worker: StartedWorker, flag: str) -> list[int]:
    """The worker's processes whose command line has a word."""
    found = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
    return [int(each) for each in found if flag in Path(f"/proc/{each}/cmdline").read_text()]


async def said_again(stub: Any, prompt: list[int]) -> list[tuple[str, list[int]]]:
    """What a worker says as soon as it serves again."""
    async with asyncio.timeout(90):
        while True:
            try:
                return (await said(stub, ask("again", prompt)))[0]
            except grpc.aio.AioRpcError as error:
                assert error.code() == grpc.StatusCode.UNAVAILABLE
                await asyncio.sleep(0.2)


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), str(caught.value.details())


async def test_an_update_from_a_folder_changes_answers_and_old_pages_are_not_found(
    stub: Any, weights: list[Path], answers: Answers
) -> None:
    prompt = tokens_of(40, seed=9)
    for turn in range(2):
        found, last = await said(stub, ask(f"a{turn}", prompt))
        assert found == [("start", answers(weights[0], prompt))]
        assert (last.usage.cached_tokens > 0) == bool(turn)
    answer = await stub.UpdateWeights(
        iter([worker_pb2.UpdateWeightsRequest(path=str(weights[1]), weight_version="one", flush_cache=False)])
    )
    assert answer.committed and answer.weights.version == "one" and len(answer.weights.digest) == 16
    for turn in range(2):
        found, last = await said(stub, ask(f"b{turn}", prompt))
        assert found == [("one", answers(weights[1], prompt))]
        assert (last.usage.cached_tokens > 0) == bool(turn), "pages of old weights must not match"
    snapshot = await stub.SubscribeKvEvents(worker_pb2.SubscribeKvEventsRequest()).read()
    told = {each for event in snapshot.events for each in event.block_stored.block_hashes}
    assert set(PromptPages(prompt, weights=answer.weights.digest).hashes(8)) <= told, "routers must find these pages"
    info = await stub.GetModelInfo(worker_pb2.GetModelInfoRequest())
    assert info.weights_in_use == (await stub.GetWeights(worker_pb2.GetWeightsRequest())).weights


async def test_streamed_tensors_become_the_weights_and_roll_back(
    stub: Any, weights: list[Path], answers: Answers
) -> None:
    new = other_weights(weights[0], 2)
    request = streamed(new, buckets=3, piece=5000, weight_version="two", keep_previous=True)
    answer = await stub.UpdateWeights(request)
    assert answer.tensors == len(new) and answer.weights.can_roll_back
    assert (await said(stub, ask("a", PROMPTS[0])))[0] == [("two", answers(weights[2], PROMPTS[0]))]
    answer = await stub.UpdateWeights(iter([worker_pb2.UpdateWeightsRequest(rollback=True)]))
    assert answer.weights.version == "start" and not answer.weights.can_roll_back
    assert (await said(stub, ask("b", PROMPTS[0])))[0] == [("start", answers(weights[0], PROMPTS[0]))]
    refused = await refusal(stub.UpdateWeights(iter([worker_pb2.UpdateWeightsRequest(rollback=True)])))
    assert refused[0] == grpc.StatusCode.INVALID_ARGUMENT and "keep_previous" in refused[1]


async def test_calls_with_one_id_stage_and_the_last_exchanges(stub: Any, weights: list[Path], answers: Answers) -> None:
    new = other_weights(weights[0], 1)
    names = sorted(new)
    half = {name: new[name] for name in names[::2]}, {name: new[name] for name in names[1::2]}
    answer = await stub.UpdateWeights(streamed(half[0], update_id="step"))
    assert not answer.committed and answer.tensors == len(half[0])
    assert (await stub.GetWeights(worker_pb2.GetWeightsRequest())).staged == ["step"]
    assert (await said(stub, ask("a", PROMPTS[1])))[0] == [("start", answers(weights[0], PROMPTS[1]))]
    answer = await stub.UpdateWeights(streamed(half[1], update_id="step", commit=True, weight_version="one"))
    assert answer.committed
    assert (await said(stub, ask("b", PROMPTS[1])))[0] == [("one", answers(weights[1], PROMPTS[1]))]
    await stub.UpdateWeights(streamed(half[0], update_id="other"))
    assert (await stub.DropWeights(worker_pb2.DropWeightsRequest(update_id="other"))).found
    assert not (await stub.DropWeights(worker_pb2.DropWeightsRequest(update_id="other"))).found


def _damaged(kind: str, new: dict[str, Tensor], folder: Path) -> list[worker_pb2.UpdateWeightsRequest]:
    messages = list(streamed(new))
    first = messages[0]
    match kind:
        case "few":
            del messages[-1]
        case "many":
            messages.append(worker_pb2.UpdateWeightsRequest(data=b"more"))
        case "bytes":
            messages[-1].data = bytes(len(messages[-1].data))
        case "dtype":
            first.tensors[0].dtype = "float3"
        case "twice":
            first.tensors[1].name = first.tensors[0].name
        case "missing":
            return list(streamed({name: new[name] for name in sorted(new)[1:]}))
        case "path":
            return [worker_pb2.UpdateWeightsRequest(path="/nowhere")]
        case "long":
            return [worker_pb2.UpdateWeightsRequest(path="/" + "a" * 5000)]
        case "pickle":
            torch.save(new, folder / "pytorch_model.bin")
            return [worker_pb2.UpdateWeightsRequest(path=str(folder))]
        case "nothing":
            return [worker_pb2.UpdateWeightsRequest()]
        case "commit":
            return [worker_pb2.UpdateWeightsRequest(commit=True)]
    return messages


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("few", "too few bytes"),
        ("many", "more bytes than tensors"),
        ("bytes", "checksum"),
        ("dtype", "unknown dtype"),
        ("twice", "twice"),
        ("missing", "lm_head.weight are missing"),
        ("path", "/nowhere does not exist"),
        ("long", "File name too long"),
        ("pickle", "pickles are not read here"),
        ("nothing", "no tensor was given"),
        ("commit", "commit goes with update_id"),
    ],
)
async def test_damaged_updates_are_refused_by_name_and_the_old_weights_stay(
    stub: Any, weights: list[Path], answers: Answers, tmp_path: Path, kind: str, words: str
) -> None:
    text = "Internal error from Core"
    while text == "Internal error from Core":  # grpcio's client, where the call ends while it still writes
        code, text = await refusal(stub.UpdateWeights(iter(_damaged(kind, other_weights(weights[0], 1), tmp_path))))
    assert code == grpc.StatusCode.INVALID_ARGUMENT and words in text, text
    assert (await said(stub, ask("a", PROMPTS[0])))[0] == [("start", answers(weights[0], PROMPTS[0]))]
    assert not shared_files()


@pytest.mark.parametrize("in_flight", ["RETRACT", "KEEP", "ABORT"])
async def test_requests_in_flight_go_on_or_end_as_asked(
    stub: Any, weights: list[Path], answers: Answers, in_flight: str
) -> None:
    count = 400
    calls = [asyncio.ensure_future(said(stub, ask(f"r{at}", prompt, count))) for at, prompt in enumerate(PROMPTS)]
    waiting = ask("waits", PROMPTS[0], 8)
    async for report in stub.WatchLoad(worker_pb2.WatchLoadRequest(interval_ms=10)):
        if report.load.running_requests == len(PROMPTS):
            break
    mode = f"IN_FLIGHT_REQUESTS_{in_flight}"
    await stub.UpdateWeights(
        iter([worker_pb2.UpdateWeightsRequest(path=str(weights[1]), weight_version="one", in_flight=mode)])
    )
    found, last = await said(stub, waiting)
    assert found == [("one", answers(weights[1], PROMPTS[0], 8))]
    if in_flight == "KEEP":  # else pages of new weights may have come already
        assert not last.usage.cached_tokens
    for prompt, call in zip(PROMPTS, calls, strict=True):
        found, last = await call
        assert found[0][0] == "start"
        tokens = found[0][1]
        assert tokens == answers(weights[0], prompt, len(tokens))
        if in_flight == "ABORT":
            assert last.finish_reason == common_pb2.FINISH_REASON_ABORT and len(found) == 1
            continue
        assert last.finish_reason == common_pb2.FINISH_REASON_LENGTH and last.usage.completion_tokens == count
        assert [version for version, _ in found] == ["start", "one"]
        if in_flight == "RETRACT":
            assert found[1][1] == answers(weights[1], prompt + tokens, count - len(tokens))


async def test_many_updates_under_load_mix_no_tokens_and_fail_no_request(
    stub: Any, weights: list[Path], answers: Answers
) -> None:
    versions = {str(number): weights[number] for number in range(3)}
    ended = False

    async def stream(at: int) -> int:
        turns = 0
        while not ended:
            prompt = PROMPTS[at % len(PROMPTS)]
            found, last = await said(stub, ask(f"s{at}-{turns}", prompt, 16))
            assert last.usage.completion_tokens == 16
            so_far = list(prompt)
            for version, tokens in found:
                path = versions["0" if version == "start" else version]
                assert tokens == answers(path, so_far, len(tokens)) if tokens else True
                so_far += tokens
            turns += 1
        return turns

    streams = [asyncio.ensure_future(stream(at)) for at in range(8)]
    for number in range(12):
        at = number % 3
        source = (
            streamed(other_weights(weights[0], at), weight_version=str(at))
            if at
            else iter([worker_pb2.UpdateWeightsRequest(path=str(weights[0]), weight_version="0")])
        )
        await stub.UpdateWeights(source)
        await asyncio.sleep(0.05)
    ended = True
    assert min(await asyncio.gather(*streams)) > 0


@pytest.mark.slow
async def test_a_killed_scheduler_has_weights_of_a_folder_read_again(
    weights: list[Path], answers: Answers, tmp_path: Path
) -> None:
    with started_worker(weights[0], tmp_path / "log", *FLAGS) as worker:
        async with grpc.aio.insecure_channel(worker.address) as channel:
            stub: Any = worker_pb2_grpc.WorkerStub(channel)
            await stub.UpdateWeights(
                iter([worker_pb2.UpdateWeightsRequest(path=str(weights[1]), weight_version="one")])
            )
            os.kill(children(worker, "scheduler_process")[0], signal.SIGKILL)
            assert await said_again(stub, PROMPTS[2]) == [("one", answers(weights[1], PROMPTS[2]))]


@pytest.mark.slow
async def test_a_rank_killed_in_mid_update_leaves_the_old_weights_everywhere(
    weights: list[Path], answers: Answers, tmp_path: Path
) -> None:
    with started_worker(weights[0], tmp_path / "log", *FLAGS, "--tensor-parallel", "2") as worker:
        async with grpc.aio.insecure_channel(worker.address) as channel:
            stub: Any = worker_pb2_grpc.WorkerStub(channel)
            before, _ = await said(stub, ask("before", PROMPTS[2]))
            new = other_weights(weights[0], 1)
            await stub.UpdateWeights(streamed(dict(sorted(new.items())[:5]), update_id="half"))
            os.kill(children(worker, "--rank")[-1], signal.SIGKILL)
            code, _ = await refusal(
                stub.UpdateWeights(streamed(dict(sorted(new.items())[5:]), update_id="half", commit=True))
            )
            assert code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INVALID_ARGUMENT)
            assert await said_again(stub, PROMPTS[2]) == before == [("default", before[0][1])]
