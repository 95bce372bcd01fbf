"""Real workers whose model is split over processes: they answer as one process does."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from sapwood.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from sapwood_common.contract.sampling import SamplingParams
from sapwood_testing.worker.split_models import SHAPE


@contextlib.contextmanager
def worker(model: Path, log: Path, *flags: str) -> Iterator[Any]:
    """A worker's stub; its process id is in ``pid``."""
    command = [
        sys.executable,
        "-m",
        "sapwood_worker",
        "--model",
        str(model),
        "--port",
        "0",
        "--metrics-port",
        "0",
        *flags,
    ]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        while (found := re.search(r"listening on (\S+)", log.read_text())) is None:
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        with grpc.insecure_channel(found[1]) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            stub.pid = process.pid
            yield stub
    finally:
        process.kill()
        process.wait()


def test_processes_answer_as_one(tiny_model: Any, make_runner: Any, make_driver: Any, tmp_path: Path) -> None:
    path = tiny_model("llama", **SHAPE).path
    prompts = {slot: [3 + (slot * 31 + place * 7) % 90 for place in range(5 + 9 * slot)] for slot in range(4)}
    params = {
        slot: SamplingParams(temperature=0.0 if slot % 2 else 0.9, seed=slot, ignore_eos=True) for slot in prompts
    }
    expected = make_driver(make_runner(path)).generate(prompts, 12, params)
    with worker(
        path, tmp_path / "log", "--tensor-parallel", "2", "--num-pages", "64", "--no-structured-output"
    ) as stub:
        assert stub.GetModelInfo(worker_pb2.GetModelInfoRequest()).tensor_parallel == 2

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


@pytest.mark.slow
def test_a_rank_lost_in_the_middle_of_a_sum_is_named_and_the_model_is_loaded_anew(
    tiny_model: Any, tmp_path: Path
) -> None:
    def ask(stub: Any, count: int) -> Iterator[list[int]]:
        sampling = common_pb2.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        request = worker_pb2.WorkerGenerateRequest(request_id="r", token_ids=range(3, 40), sampling=sampling)
        for response in stub.Generate(request):
            yield list(response.token_ids)

    def ranks(stub: Any) -> list[int]:
        return [int(child) for child in Path(f"/proc/{stub.pid}/task/{stub.pid}/children").read_text().split()]

    path = tiny_model("llama", **SHAPE).path
    with worker(
        path, tmp_path / "log", "--tensor-parallel", "2", "--num-pages", "80", "--no-structured-output"
    ) as stub:
        expected = list(ask(stub, 40))
        for number in (signal.SIGKILL, signal.SIGSTOP):
            stream = ask(stub, 900)
            next(stream)
            os.kill(ranks(stub)[1], number)
            with pytest.raises(grpc.RpcError, match="rank 1 of 2") as lost:
                list(stream)
            assert lost.value.code() == grpc.StatusCode.UNAVAILABLE
            answer: list[list[int]] = []
            while not answer:
                time.sleep(0.1)
                with contextlib.suppress(grpc.RpcError):
                    answer = list(ask(stub, 40))
            assert [token for part in answer for token in part] == [token for part in expected for token in part]
