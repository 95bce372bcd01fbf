"""A real worker, front and scheduler in their processes, around the runner that needs no model."""

from __future__ import annotations

import asyncio
import math
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sapwood.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.contract.seeds import child_seed
from sapwood_common.status import from_rpc_error
from sapwood_testing.worker.asking import collect, load_where, rest_of
from sapwood_testing.worker.fake_runner import continuation

VOCAB = 1000
POISON = 999  # a prompt that begins with it makes its step fail
ROOMY = ("--num-pages", "4096")  # what has no end of its own continues for a minute
UNCACHED = ("--no-prefix-cache", *ROOMY)
SEED = 11


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def request(name: str, prompt: list[int], **sampling: object) -> worker_pb2.WorkerGenerateRequest:
    return worker_pb2.WorkerGenerateRequest(
        request_id=name,
        token_ids=prompt,
        sampling=common_pb2.SamplingParams(**({"seed": SEED} | sampling)),  # type: ignore[arg-type]
    )


def expected(prompt: list[int], count: int) -> list[int]:
    return list(islice(continuation(prompt, SamplingParams(seed=SEED), VOCAB), count))


async def test_concurrent_requests_each_get_their_own_tokens_and_usage(lend) -> None:
    async with grpc.aio.insecure_channel(lend().address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        prompts = {f"r{n}": [7] * 20 + [n] for n in range(100)}
        results = await asyncio.gather(*(collect(stub, request(n, p, max_tokens=30)) for n, p in prompts.items()))
        for prompt, (tokens, last) in zip(prompts.values(), results, strict=True):
            assert tokens == expected(prompt, 30)
            assert last.finish_reason == common_pb2.FINISH_REASON_LENGTH
            assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (21, 30)
        assert sum(last.usage.cached_tokens for _, last in results) > 0
        load = await load_where(stub, lambda load: not load.running_requests)
        assert load.used_pages == load.evictable_pages
        freed = await stub.FlushCache(worker_pb2.FlushCacheRequest())
        assert freed.freed_pages == load.used_pages


async def test_more_tokens_than_the_context_holds_are_cut_to_what_it_holds(lend) -> None:
    async with grpc.aio.insecure_channel(lend("--context-length", "1000", step_ms=0).address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        info = await stub.GetModelInfo(worker_pb2.GetModelInfoRequest())
        room = info.context_length - 3
        for number, most in enumerate(({"max_tokens": 2**31 - 1}, {"max_tokens": room + 1}, {})):
            tokens, last = await collect(stub, request(f"r{number}", [1, 2, 3], ignore_eos=True, **most))
            assert (len(tokens), last.finish_reason) == (room, common_pb2.FINISH_REASON_LENGTH)


async def test_closing_the_call_stops_the_request_and_frees_its_pages(lend) -> None:
    async with grpc.aio.insecure_channel(lend(*UNCACHED).address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        calls = [stub.Generate(request(f"r{n}", [n] * 40, ignore_eos=True)) for n in range(8)]
        for call in calls:
            await call.read()
        assert (await load_where(stub, lambda load: load.running_requests == 8)).used_pages >= 24
        for call in calls:
            call.cancel()
        assert (await load_where(stub, lambda load: not load.running_requests)).used_pages == 0


async def test_a_deadline_ends_the_request_too_also_in_the_queue(start) -> None:
    async with grpc.aio.insecure_channel(start("--max-running", "1", "--no-prefix-cache", *ROOMY).address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        for seconds in (0.5, 5, 30):  # where the machine is slow, the first may pass before all are there
            names = [f"r{n}-{seconds}" for n in range(3)]
            calls = [stub.Generate(request(name, [1], ignore_eos=True), timeout=seconds) for name in names]
            queued = asyncio.ensure_future(
                load_where(stub, lambda load: (load.running_requests, load.waiting_requests) == (1, 2))
            )
            for call in calls:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    async for _ in call:
                        pass
                assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            if queued.done():
                break
            queued.cancel()
        await queued
        load = await load_where(stub, lambda load: not load.running_requests and not load.waiting_requests)
        assert load.used_pages == 0


async def test_abort_ends_the_call_with_cancelled(lend) -> None:
    async with grpc.aio.insecure_channel(lend(*UNCACHED).address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        call = stub.Generate(request("mine", [1]))
        await call.read()
        assert (await stub.Abort(worker_pb2.AbortRequest(request_id="mine"))).found
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rest_of(call)
        assert caught.value.code() == grpc.StatusCode.CANCELLED
        assert not (await stub.Abort(worker_pb2.AbortRequest(request_id="mine"))).found


async def test_an_id_can_be_used_again_as_soon_as_its_call_is_over(lend) -> None:
    async with grpc.aio.insecure_channel(lend().address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        for number in range(30):
            call = stub.Generate(request("again", [number], max_tokens=1000))
            first = list((await call.read()).token_ids)
            assert first == expected([number], len(first))
            call.cancel()
            async with asyncio.timeout(60):
                while True:  # the cancellation is on its way to the worker
                    try:
                        tokens, _ = await collect(stub, request("again", [number, 1], max_tokens=3))
                        break
                    except grpc.aio.AioRpcError as error:
                        assert error.code() == grpc.StatusCode.ALREADY_EXISTS
            assert tokens == expected([number, 1], 3)


async def test_a_failed_step_ends_its_requests_internal_and_the_worker_goes_on(lend) -> None:
    async with grpc.aio.insecure_channel(lend(*UNCACHED).address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        beside = stub.Generate(request("beside", [1]))
        await beside.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stub, request("poison", [POISON, 2], max_tokens=5))
        assert caught.value.code() == grpc.StatusCode.INTERNAL
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while True:
                await beside.read()
        assert caught.value.code() == grpc.StatusCode.INTERNAL
        assert (await collect(stub, request("next", [4], max_tokens=5)))[0] == expected([4], 5)


async def test_the_model_is_described(start) -> None:
    worker = start("--eos-token", "7", "--num-pages", "40", "--page-size", "8")
    async with grpc.aio.insecure_channel(worker.address) as channel:
        info = await worker_pb2_grpc.WorkerStub(channel).GetModelInfo(worker_pb2.GetModelInfoRequest())
    assert (info.model, info.vocab_size, list(info.eos_token_ids)) == ("fake", VOCAB, [7])
    assert (info.page_size, info.num_pages, info.context_length) == (8, 40, 320)
    assert info.epoch > 0


async def test_a_slow_reader_gets_its_tokens_merged_and_none_is_lost(lend) -> None:
    async with grpc.aio.insecure_channel(lend("--context-length", "1000", step_ms=0).address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        call = stub.Generate(request("slow", [5], max_tokens=900))
        await load_where(stub, lambda load: load.prompt_tokens and not load.running_requests)
        tokens, messages = [], 0
        async for response in call:
            messages += 1
            tokens += response.token_ids
        assert tokens == expected([5], 900)
        assert messages < 900


@pytest.mark.parametrize(
    ("prompt", "sampling", "field"),
    [
        ([], {}, "token_ids"),
        ([VOCAB], {}, "token_ids"),
        ([1] * 4096, {}, "token_ids"),
        ([1], {"temperature": -1}, "sampling.temperature"),
        ([1], {"temperature": float("nan")}, "sampling.temperature"),
        ([1], {"top_p": 0}, "sampling.top_p"),
        ([1], {"top_p": 1.5}, "sampling.top_p"),
        ([1], {"min_p": -0.1}, "sampling.min_p"),
        ([1], {"max_tokens": 0}, "sampling.max_tokens"),
        ([1], {"stop_token_ids": [VOCAB]}, "sampling.stop_token_ids"),
        ([1], {"frequency_penalty": 2.5}, "sampling.frequency_penalty"),
        ([1], {"frequency_penalty": float("nan")}, "sampling.frequency_penalty"),
        ([1], {"presence_penalty": -2.5}, "sampling.presence_penalty"),
        ([1], {"repetition_penalty": 0}, "sampling.repetition_penalty"),
        ([1], {"repetition_penalty": float("inf")}, "sampling.repetition_penalty"),
        ([1], {"logit_bias": {VOCAB: 1.0}}, "sampling.logit_bias"),
        ([1], {"logit_bias": {1: 101.0}}, "sampling.logit_bias"),
        ([1], {"logit_bias": {1: float("nan")}}, "sampling.logit_bias"),
        ([1], {"min_tokens": 6, "max_tokens": 5}, "sampling.min_tokens"),
        ([1], {"n": 0}, "sampling.n"),
        ([1], {"n": 129}, "sampling.n"),
        ([1], {"logprobs": 21}, "sampling.logprobs"),
        ([1], {"prompt_logprobs": 21}, "sampling.prompt_logprobs"),
    ],
)
async def test_a_bad_field_is_named(lend, prompt: list[int], sampling: dict[str, object], field: str) -> None:
    async with grpc.aio.insecure_channel(lend().address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stub, request("bad", prompt, **sampling))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert from_rpc_error(caught.value).field == field
        assert (await collect(stub, request("good", [1], max_tokens=2)))[0] == expected([1], 2)


async def test_n_continuations_share_a_prompt_and_each_has_its_own_end(lend) -> None:
    prompt = [53] * 100  # with which no other test's begins
    async with grpc.aio.insecure_channel(lend().address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        parts: dict[int, list[worker_pb2.WorkerGenerateResponse]] = {}
        async for response in stub.Generate(request("many", prompt, n=4, max_tokens=20)):
            parts.setdefault(response.index, []).append(response)
        assert sorted(parts) == [0, 1, 2, 3]
        cached = []
        for index, responses in parts.items():
            tokens = [token for response in responses for token in response.token_ids]
            params = SamplingParams(seed=child_seed(SEED, index))
            assert tokens == list(islice(continuation(prompt, params, VOCAB), 20))
            assert [bool(response.finish_reason) for response in responses] == [False] * (len(responses) - 1) + [True]
            usage = responses[-1].usage
            assert (usage.prompt_tokens, usage.completion_tokens) == (100, 20)
            assert responses[0].HasField("usage")
            cached.append(usage.cached_tokens)
        # One computes the prompt. The others take its last logits, or compute them if they come after its step has begun.
        assert sorted(cached)[0] == 0 and set(sorted(cached)[1:]) <= {99, 100}


async def test_closing_a_call_ends_all_its_continuations_and_one_refused_refuses_all(start) -> None:
    worker = start("--max-running", "2", "--max-waiting", "2", "--no-prefix-cache", *ROOMY)
    async with grpc.aio.insecure_channel(worker.address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        call = stub.Generate(request("many", [1], n=2, ignore_eos=True))
        await load_where(stub, lambda load: load.running_requests == 2)
        call.cancel()
        load = await load_where(stub, lambda load: not load.running_requests)
        assert load.used_pages == 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stub, request("too-many", [1], n=6))
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        load = await load_where(stub, lambda load: not load.running_requests and not load.waiting_requests)
        assert load.used_pages == 0
        assert (await collect(stub, request("too-many", [1], max_tokens=3)))[0] == expected([1], 3)


async def test_log_probabilities_come_with_the_tokens_and_the_prompts_with_the_first(lend) -> None:
    prompt = [5, 6, 7] * 30
    async with grpc.aio.insecure_channel(lend().address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        await collect(stub, request("before", prompt, max_tokens=1))
        message = request("logs", prompt, n=2, max_tokens=9, logprobs=2, prompt_logprobs=1)
        responses = [response async for response in stub.Generate(message)]
        for index in (0, 1):
            own = [response for response in responses if response.index == index]
            tokens = [token for response in own for token in response.token_ids]
            logprobs = [each for response in own for each in response.logprobs]
            assert [each.logprob for each in logprobs] == pytest.approx([-math.log(token + 2) for token in tokens])
            assert all(list(each.top_ids) == [0, 1] and len(each.top_logprobs) == 2 for each in logprobs)
            of_prompt = [each for response in own for each in response.prompt_logprobs]
            assert len(own[0].prompt_logprobs) == len(of_prompt)
            wanted = [-math.log(token + 2) for token in prompt[1:]] if index == 0 else []
            assert [each.logprob for each in of_prompt] == pytest.approx(wanted)
        plain = [each async for each in stub.Generate(request("plain", prompt, max_tokens=2))]
        assert not any(each.logprobs or each.prompt_logprobs for each in plain)


async def test_a_full_queue_and_a_taken_id_are_refused(start) -> None:
    async with grpc.aio.insecure_channel(start("--max-running", "1", "--max-waiting", "1", *ROOMY).address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        calls = []
        # One after the other: together they would both wait for the first step, one too many.
        for number, counts in enumerate([(1, 0), (1, 1)]):
            calls.append(stub.Generate(request(f"r{number}", [number])))
            await load_where(stub, lambda load: (load.running_requests, load.waiting_requests) == counts)  # noqa: B023
        for name, code in (("r0", grpc.StatusCode.ALREADY_EXISTS), ("r9", grpc.StatusCode.RESOURCE_EXHAUSTED)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await collect(stub, request(name, [1]))
            assert caught.value.code() == code
        error = from_rpc_error(caught.value)
        assert error.retry_after is not None
        for call in calls:
            call.cancel()


async def test_sigterm_finishes_what_runs_refuses_what_is_new_and_exits_0(start) -> None:
    worker = start(step_ms=10)
    async with grpc.aio.insecure_channel(worker.address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        call = stub.Generate(request("running", [3], max_tokens=400))  # four seconds, in which others ask
        tokens = list((await call.read()).token_ids)
        worker.process.send_signal(signal.SIGTERM)
        health = health_pb2_grpc.HealthStub(channel)
        while (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING:
            await asyncio.sleep(0.01)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stub, request("late", [1]))
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        tokens += await rest_of(call)
        assert tokens == expected([3], 400)
    assert worker.wait() == 0


def test_the_scheduler_dies_with_its_front(start) -> None:
    worker = start()
    scheduler = worker.scheduler_pid()
    worker.process.kill()
    worker.wait()
    until = time.monotonic() + 60
    while is_alive(scheduler):
        assert time.monotonic() < until, "the scheduler process outlives its front"
        time.sleep(0.02)


def test_a_model_that_is_not_there_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sapwood_worker", "--model", str(tmp_path / "none.gguf"), "--port", "0"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "none.gguf" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_directory_without_weights_is_one_line_from_the_scheduler_process(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    command = [sys.executable, "-m", "sapwood_worker", "--model", str(tmp_path), "--port", "0"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "config.json" in done.stderr
    assert "docs/models.md" in done.stderr, "it says where to find what is supported"
    assert "Traceback" not in done.stderr


def test_a_port_that_is_taken_is_one_line_and_exit_code_1(taken_port: int) -> None:
    command = [sys.executable, "-m", "sapwood_testing.worker.fake_worker", "--port", str(taken_port)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{taken_port}" in done.stderr
    assert "Traceback" not in done.stderr


def test_sigterm_while_the_model_loads_ends_the_worker_with_0() -> None:
    command = [sys.executable, "-m", "sapwood_testing.worker.fake_worker", "--port", "0", "--load-seconds", "600"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any("loading for 600 s" in line for line in process.stderr)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 0


async def test_what_was_asked_before_is_drafted_and_counted_unless_a_request_says_no(lend) -> None:
    async with grpc.aio.insecure_channel(lend("--speculate", "prefix").address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        assert (await stub.GetModelInfo(worker_pb2.GetModelInfoRequest())).speculate == "prefix"
        prompt = [5] * 20
        first, _ = await collect(stub, request("first", prompt, max_tokens=60, ignore_eos=True))
        again, last = await collect(stub, request("again", prompt, max_tokens=60, ignore_eos=True))
        plain, none = await collect(stub, request("plain", prompt, max_tokens=60, ignore_eos=True, speculate=False))
        assert first == again == plain == expected(prompt, 60)
        # The cache has whole pages of 16: the answer's last tokens are not in it.
        assert last.usage.accepted_prediction_tokens >= 20
        assert last.usage.rejected_prediction_tokens <= 40
        assert (none.usage.accepted_prediction_tokens, none.usage.rejected_prediction_tokens) == (0, 0)
