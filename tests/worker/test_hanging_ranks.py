"""A rank of a real worker hangs in a step, alive: the other ranks show which one it is, and the model is loaded again."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from sapwood.v1 import common_pb2, worker_pb2
from sapwood_testing.worker.split_models import SHAPE
from sapwood_testing.worker.worker_stub import two_hosts, worker


def ask(stub: Any, count: int, number: int = 0) -> Iterator[list[int]]:
    sampling = common_pb2.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    request = worker_pb2.WorkerGenerateRequest(
        request_id=f"r{number}", token_ids=range(3, 40 + number), sampling=sampling
    )
    for response in stub.Generate(request):
        yield list(response.token_ids)


def answer(stub: Any) -> list[int]:
    """An answer, once the group is up."""
    while True:
        with contextlib.suppress(grpc.RpcError):
            return [token for tokens in ask(stub, 20) for token in tokens]
        time.sleep(0.1)


SPLITS = {
    "tensor": ("--tensor-parallel", "2"),
    "two hosts": ("--tensor-parallel", "2"),
    "gloo": ("--tensor-parallel", "2", "--all-reduce", "backend"),
    "pipeline": ("--pipeline-parallel", "2"),
    "four": ("--tensor-parallel", "2", "--pipeline-parallel", "2"),
    "own requests": ("--tensor-parallel", "2", "--data-parallel-attention"),
    "queued": ("--tensor-parallel", "2", "--as-on-gpus"),
    "queued own requests": ("--tensor-parallel", "2", "--data-parallel-attention", "--as-on-gpus"),
    "four queued": ("--tensor-parallel", "4", "--as-on-gpus"),
    "four queued own requests": ("--tensor-parallel", "4", "--data-parallel-attention", "--as-on-gpus"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("split", "hangs"),
    [
        ("tensor", [(0, "loop"), (1, "blocked")]),
        ("tensor", [(0, "computing"), (1, "blocked with the lock")]),
        ("tensor", [(0, "blocked"), (1, "computing")]),
        ("two hosts", [(1, "loop"), (0, "blocked")]),
        ("gloo", [(0, "blocked"), (1, "loop")]),
        ("pipeline", [(0, "loop"), (1, "blocked")]),
        ("pipeline", [(1, "loop"), (0, "blocked")]),
        ("own requests", [(0, "loop"), (1, "blocked")]),
        ("four", [(2, "loop"), (1, "blocked")]),
        ("queued", [(0, "loop"), (1, "blocked")]),
        ("queued", [(0, "blocked with the lock"), (1, "computing")]),
        ("queued own requests", [(0, "blocked"), (1, "loop")]),
    ],
)
def test_a_rank_that_hangs_is_named_and_the_model_is_loaded_again(
    tiny_model: Any, tmp_path: Path, split: str, hangs: list[tuple[int, str]]
) -> None:
    path = tiny_model("llama", **SHAPE).path
    flags = [*SPLITS[split], "--num-pages", "240", "--no-structured-output", "--threads", "1"]
    flags += ["--hang-folder", str(tmp_path)]
    started = (
        partial(two_hosts, path, tmp_path / "log", None)
        if split == "two hosts"
        else partial(worker, path, tmp_path / "log")
    )
    with started(*flags, module="sapwood_testing.worker.ranks.hanging_worker") as stub:
        expected = answer(stub)
        for rank, how in hangs:
            streams = [ask(stub, 900, number) for number in range(3)]
            for stream in streams:
                next(stream)
            (tmp_path / f"{'launch-' * split.startswith('queued')}{rank}").write_text(how)
            for stream in streams:
                with pytest.raises(grpc.RpcError) as lost:
                    list(stream)
                assert lost.value.code() == grpc.StatusCode.UNAVAILABLE
                assert f"rank {rank} of " in str(lost.value.details())
            assert answer(stub) == expected
    said = (tmp_path / "log").read_text()
    assert "hanging_model.py" in said, "the stacks say where"


@pytest.mark.slow
@pytest.mark.parametrize("split", ["four queued", "four queued own requests"])
def test_a_rank_whose_device_fails_is_named_while_the_other_devices_wait_for_it(
    tiny_model: Any, tmp_path: Path, split: str
) -> None:
    """Else they would be looked at for half a minute, and none be named."""
    path = tiny_model("llama", **SHAPE).path
    flags = [*SPLITS[split], "--num-pages", "240", "--no-structured-output", "--threads", "1"]
    flags += ["--hang-folder", str(tmp_path)]
    module = "sapwood_testing.worker.ranks.hanging_worker"
    with worker(path, tmp_path / "log", *flags, module=module) as stub:
        expected = answer(stub)
        for rank in (0, 3):
            stream = ask(stub, 900)
            next(stream)
            (tmp_path / f"{rank}").write_text("fails")
            with pytest.raises(grpc.RpcError) as lost:
                list(stream)
            assert lost.value.code() == grpc.StatusCode.UNAVAILABLE
            assert f"rank {rank} failed: device-side assert" in str(lost.value.details())
            assert answer(stub) == expected


@pytest.mark.slow
def test_a_device_that_hangs_with_a_step_that_all_ranks_have_launched_ends_the_group(
    tiny_model: Any, tmp_path: Path
) -> None:
    path = tiny_model("llama", **SHAPE).path
    flags = [*SPLITS["queued"], "--num-pages", "240", "--no-structured-output", "--threads", "1"]
    flags += ["--hang-folder", str(tmp_path)]
    module = "sapwood_testing.worker.ranks.hanging_worker"
    with worker(path, tmp_path / "log", *flags, module=module) as stub:
        expected = answer(stub)
        stream = ask(stub, 900)
        next(stream)
        (tmp_path / "1").write_text("blocked")
        with pytest.raises(grpc.RpcError) as lost:
            list(stream)
        assert lost.value.code() == grpc.StatusCode.UNAVAILABLE
        assert "the ranks' devices hang" in str(lost.value.details())
        assert answer(stub) == expected
