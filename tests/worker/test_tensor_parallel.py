"""Real workers whose model is split over processes: they answer as one process does."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from sapwood.v1 import common_pb2, worker_pb2
from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.models.model_files import packaged_path
from sapwood_testing.ports import port_of_its_own
from sapwood_testing.worker.group_key import group_key
from sapwood_testing.worker.split_models import SHAPE
from sapwood_testing.worker.worker_stub import two_hosts, worker

SCHEMA = json.dumps({"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}, "required": ["n"]})


@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_processes_answer_as_one(
    tiny_model: Any, make_runner: Any, make_driver: Any, tmp_path: Path, kind: str
) -> None:
    path = tiny_model("llama", **SHAPE).path
    prompts = {slot: [3 + (slot * 31 + place * 7) % 90 for place in range(5 + 9 * slot)] for slot in range(4)}
    params = {
        slot: SamplingParams(temperature=0.0 if slot % 2 else 0.9, seed=slot, ignore_eos=True) for slot in prompts
    }
    expected = make_driver(make_runner(path)).generate(prompts, 12, params)
    flags = (f"--{kind}-parallel", "2", "--num-pages", "64", "--no-structured-output")
    with worker(path, tmp_path / "log", *flags) as stub:
        info = stub.GetModelInfo(worker_pb2.GetModelInfoRequest())
        assert (info.tensor_parallel, info.pipeline_parallel) == ((2, 1) if kind == "tensor" else (1, 2))
        assert info.speculate == ("auto" if kind == "tensor" else "off"), (
            "drafts would take the stages' micro-batches away"
        )
        assert bool(info.all_reduce) == (kind == "tensor")

        def ask(slot: int) -> list[int]:
            sampling = common_pb2.SamplingParams(
                temperature=params[slot].temperature, seed=slot, max_tokens=12, ignore_eos=True
            )
            request = worker_pb2.WorkerGenerateRequest(
                request_id=f"r{slot}", token_ids=prompts[slot], sampling=sampling
            )
            return [token for response in stub.Generate(request) for token in response.token_ids]

        with ThreadPoolExecutor(4) as executor:
            assert dict(zip(prompts, executor.map(ask, prompts), strict=True)) == expected
        if kind == "tensor":
            shown = httpx.get(re.search(r"metrics at (\S+)", (tmp_path / "log").read_text())[1]).text  # type: ignore[index]
            summed = re.findall(r'^sapwood_worker_all_reduces_total\{method="(.*)"\} (\S+)', shown, re.MULTILINE)
            assert sum(float(count) for _, count in summed) > 0
            assert {name for name, count in summed if float(count)} <= set(
                re.findall(r"[a-z]+-shot|backend", info.all_reduce)
            )
            assert 'sapwood_worker_all_reduce_seconds{bytes="4096",method="backend"}' in shown


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_a_rank_lost_in_the_middle_of_a_step_is_named_and_the_model_is_loaded_again(
    tiny_model: Any, tmp_path: Path, kind: str
) -> None:
    """Of three requests at once each stage of a pipeline computes others."""

    def ask(stub: Any, count: int, number: int = 0) -> Iterator[list[int]]:
        sampling = common_pb2.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        request = worker_pb2.WorkerGenerateRequest(
            request_id=f"r{number}", token_ids=range(3, 40 + number), sampling=sampling
        )
        for response in stub.Generate(request):
            yield list(response.token_ids)

    def ranks(stub: Any) -> list[int]:
        return [int(child) for child in Path(f"/proc/{stub.pid}/task/{stub.pid}/children").read_text().split()]

    path = tiny_model("llama", **SHAPE).path
    flags = (f"--{kind}-parallel", "2", "--num-pages", "240", "--no-structured-output")
    with worker(path, tmp_path / "log", *flags) as stub:
        expected = list(ask(stub, 40))
        for number in (signal.SIGKILL, signal.SIGSTOP):
            streams = [ask(stub, 900, each) for each in range(3)]
            for stream in streams:
                next(stream)
            os.kill(ranks(stub)[1], number)
            for stream in streams:
                with pytest.raises(grpc.RpcError, match="rank 1 of 2") as lost:
                    list(stream)
                assert lost.value.code() == grpc.StatusCode.UNAVAILABLE
            answer: list[list[int]] = []
            while not answer:
                time.sleep(0.1)
                with contextlib.suppress(grpc.RpcError):
                    answer = list(ask(stub, 40))
            assert [token for part in answer for token in part] == [token for part in expected for token in part]


@pytest.mark.slow
@pytest.mark.parametrize("split", [("tensor",), ("pipeline",), ("tensor", "pipeline")])
def test_two_hosts_answer_as_one_process(
    tiny_model: Any,
    make_runner: Any,
    make_driver: Any,
    make_namespace: Any,
    tmp_path: Path,
    split: tuple[str, ...],
) -> None:
    path = tiny_model("gemma3", **SHAPE).path
    prompts = {slot: [3 + (slot * 31 + place * 7) % 90 for place in range(70 - 9 * slot)] for slot in range(3)}
    params = {slot: SamplingParams(temperature=0.9, seed=slot, ignore_eos=True) for slot in prompts}
    expected = make_driver(make_runner(path)).generate(prompts, 12, params)
    flags = [
        "--num-pages",
        "64",
        "--no-structured-output",
        *(word for kind in split for word in (f"--{kind}-parallel", "2")),
    ]
    with two_hosts(path, tmp_path / "log", make_namespace(), *flags) as stub:

        def ask(slot: int) -> list[int]:
            sampling = common_pb2.SamplingParams(temperature=0.9, seed=slot, max_tokens=12, ignore_eos=True)
            request = worker_pb2.WorkerGenerateRequest(
                request_id=f"r{slot}", token_ids=prompts[slot], sampling=sampling
            )
            return [token for response in stub.Generate(request) for token in response.token_ids]

        with ThreadPoolExecutor(3) as executor:  # each stage computes others of them
            assert dict(zip(prompts, executor.map(ask, prompts), strict=True)) == expected


@pytest.mark.slow
def test_hosts_meet_at_an_ipv6_address(tiny_model: Any, tmp_path: Path) -> None:
    path = tiny_model("llama", **SHAPE).path
    flags = ["--nnodes", "2", "--rendezvous", f"[::1]:{port_of_its_own()}", "--tensor-parallel", "2"]
    flags += ["--rendezvous-key", group_key()]
    flags += ["--num-pages", "64", "--no-structured-output"]
    command = [sys.executable, "-m", "sapwood_worker", "--model", str(path), "--node-rank", "1", *flags]
    second = subprocess.Popen(command)
    try:
        with worker(path, tmp_path / "log", *flags) as stub:
            sampling = common_pb2.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            request = worker_pb2.WorkerGenerateRequest(request_id="r", token_ids=range(3, 40), sampling=sampling)
            assert sum(len(response.token_ids) for response in stub.Generate(request)) == 8
    finally:
        second.terminate()
        assert second.wait() == 0


@pytest.mark.slow
def test_hosts_with_other_weights_or_files_say_so(tiny_model: Any, make_namespace: Any, tmp_path: Path) -> None:
    path = tiny_model("llama", **SHAPE).path
    other = tmp_path / "other"
    shutil.copytree(path, other)
    weights = other / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    flags = ("--num-pages", "64", "--no-structured-output", "--tensor-parallel", "2")
    with (
        pytest.raises(AssertionError, match="rank 1 has found other files there"),
        two_hosts(path, tmp_path / "log", make_namespace(), *flags, others=other),
    ):
        pass


def demo_answers(stub: Any) -> list[tuple[list[int], list[float]]]:
    """The tokens and log probabilities of many requests at once, twice, with a shared prefix and more than the pages hold."""
    shared = [2, *(1000 + 7 * place for place in range(63))]
    samplings = [
        common_pb2.SamplingParams(temperature=0, logprobs=2),
        common_pb2.SamplingParams(temperature=0.8, seed=5, top_p=0.9),
        common_pb2.SamplingParams(temperature=0, presence_penalty=0.5, repetition_penalty=1.2),
        common_pb2.SamplingParams(temperature=0.7, seed=9),
        common_pb2.SamplingParams(temperature=1.0, seed=3, top_k=20, logprobs=0),
    ]

    def ask(number: int) -> tuple[list[int], list[float]]:
        sampling = common_pb2.SamplingParams()
        sampling.CopyFrom(samplings[number % len(samplings)])
        sampling.max_tokens = 16
        prompt = [*shared, *(3000 + 11 * number + place for place in range(20 + 6 * number))]
        grammar = common_pb2.Grammar(json_schema=SCHEMA) if number % len(samplings) == 3 else None
        request = worker_pb2.WorkerGenerateRequest(
            request_id=f"r{number}", token_ids=prompt, sampling=sampling, grammar=grammar
        )
        tokens: list[int] = []
        logprobs: list[float] = []
        for response in stub.Generate(request):
            tokens += response.token_ids
            logprobs += [each.logprob for each in response.logprobs]
        return tokens, logprobs

    with ThreadPoolExecutor(5) as executor:
        first = list(executor.map(ask, range(5)))
        stub.ClearCache(worker_pb2.ClearCacheRequest(tiers=[worker_pb2.CACHE_TIER_DEVICE]))
        again = list(executor.map(ask, range(5)))
    assert [tokens for tokens, _ in first] == [tokens for tokens, _ in again]
    return first


@pytest.mark.slow
@pytest.mark.model
def test_the_demo_model_over_two_hosts_answers_as_in_one_process(make_namespace: Any, tmp_path: Path) -> None:
    flags = ("--num-pages", "24", "--max-running", "5", "--conservativeness", "0", "--host-cache-ratio", "3")
    flags += ("--threads", "1", "--tensor-parallel", "2")
    with worker(packaged_path("demo-base"), tmp_path / "log", *flags[:-2]) as stub:
        whole = demo_answers(stub)
    with two_hosts(packaged_path("demo-base"), tmp_path / "log-hosts", make_namespace(), *flags) as stub:
        for (tokens, logprobs), (expected, theirs) in zip(demo_answers(stub), whole, strict=True):
            assert tokens == expected
            assert logprobs == pytest.approx(theirs, abs=1e-3)
        tiers = stub.GetCacheStats(worker_pb2.GetCacheStatsRequest()).tiers
        assert next(each for each in tiers if each.tier == worker_pb2.CACHE_TIER_HOST).hit_tokens > 0


@pytest.mark.slow
@pytest.mark.model
def test_the_demo_model_over_two_and_four_processes_answers_as_in_one(tmp_path: Path) -> None:
    sizes = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)]
    flags = (
        "--num-pages",
        "24",
        "--max-running",
        "5",
        "--conservativeness",
        "0",
        "--host-cache-ratio",
        "3",
        "--threads",
        "2",
    )
    found = {}
    for size in sizes:
        split = ("--tensor-parallel", str(size[0]), "--pipeline-parallel", str(size[1]))
        with worker(packaged_path("demo-base"), tmp_path / f"log-{size}", *flags, *split) as stub:
            found[size] = demo_answers(stub)
            tiers = stub.GetCacheStats(worker_pb2.GetCacheStatsRequest()).tiers
            assert next(each for each in tiers if each.tier == worker_pb2.CACHE_TIER_HOST).hit_tokens > 0
    for size in sizes[1:]:
        for (tokens, logprobs), (expected, theirs) in zip(found[size], found[1, 1], strict=True):
            assert tokens == expected
            assert logprobs == pytest.approx(theirs, abs=1e-3)


OWN_REQUESTS = "2 --data-parallel-attention"


@pytest.mark.slow
def test_what_a_group_has_stored_is_read_by_groups_of_other_sizes(tiny_model: Any, tmp_path: Path) -> None:
    path = tiny_model("llama", **SHAPE).path
    flags = [
        *("--num-pages", "24", "--max-running", "2", "--no-structured-output", "--host-cache-ratio", "1"),
        *("--storage", f"file://{tmp_path}/store?size_gb=1", "--storage-min-tokens", "16"),
        *("--storage-prefetch", "wait_complete"),
    ]

    def ask(stub: Any, document: int) -> list[int]:
        prompt = [3 + (document * 31 + place * 7) % 90 for place in range(130)]
        sampling = common_pb2.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        request = worker_pb2.WorkerGenerateRequest(request_id=f"r{document}", token_ids=prompt, sampling=sampling)
        return [token for response in stub.Generate(request) for token in response.token_ids]

    def of_store(stub: Any) -> Any:
        tiers = stub.GetCacheStats(worker_pb2.GetCacheStatsRequest()).tiers
        return next(each for each in tiers if each.tier == worker_pb2.CACHE_TIER_STORAGE)

    expected: dict[int, list[int]] = {}
    # Each group reads the documents of those before it and stores one more.
    own_requests = ("--tensor-parallel", *OWN_REQUESTS.split())
    sizes = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 1)]
    splits = [("--tensor-parallel", str(tensor), "--pipeline-parallel", str(pipeline)) for tensor, pipeline in sizes]
    for document, split in enumerate([*splits[:2], own_requests, *splits[2:], own_requests]):
        with worker(path, tmp_path / f"log-{document}", *flags, *split) as stub:
            for earlier, tokens in expected.items():
                assert ask(stub, earlier) == tokens
            assert of_store(stub).hit_tokens == len(expected) * 128
            assert of_store(stub).rejected_pages == 0
            expected[document] = ask(stub, document)
            while of_store(stub).bytes_in == 0:
                time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [("2", "1"), ("1", "2"), ("2", "4"), (OWN_REQUESTS, "1"), ("2", OWN_REQUESTS)])
def test_a_prompt_is_handed_off_between_groups_of_other_sizes(
    tiny_model: Any, tmp_path: Path, sizes: tuple[str, str]
) -> None:
    path = tiny_model("llama", **SHAPE).path
    prompt = [3 + place * 7 % 90 for place in range(130)]
    flags = ("--num-pages", "24", "--max-running", "2", "--no-structured-output")

    def ask(stub: Any, **fields: Any) -> tuple[list[int], Any]:
        sampling = common_pb2.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        request = worker_pb2.WorkerGenerateRequest(request_id="r", token_ids=prompt, sampling=sampling, **fields)
        responses = list(stub.Generate(request))
        return [token for response in responses for token in response.token_ids], responses[-1]

    def role(number: int) -> tuple[str, ...]:
        return ("--role", ("prefill", "decode")[number], "--tensor-parallel", *sizes[number].split())

    with (
        worker(path, tmp_path / "log-0", *flags, *role(0)) as prefill,
        worker(path, tmp_path / "log-1", *flags, *role(1)) as decode,
    ):
        expected, _ = ask(prefill)
        first, last = ask(prefill, hand_off=True)
        ticket = last.ticket
        assert first == expected[:1]
        ticket.source = f"127.0.0.1{ticket.source}"
        tokens, last = ask(decode, ticket=ticket)
        assert tokens == expected
        assert last.usage.cached_tokens == 128
