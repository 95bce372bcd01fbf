"""Several workers of a machine, each with GPUs of its own."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from sapwood.cli import up
from sapwood.cli.errors import CliError
from sapwood.cli.local.cluster import Cluster
from sapwood.cli.main import build_parser
from sapwood.cli.services import Services


def read(*flags: str) -> Services:
    return up._services(build_parser("up").parse_args(["up", *flags]))


def test_each_worker_gets_the_next_gpus_of_those_that_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, 2,GPU-a,7,1")
    assert read("--workers", "2", "--tensor-parallel", "2").gpus == ("5,2", "GPU-a,7")
    assert read("--workers", "3").gpus == ("5", "2", "GPU-a")
    assert read("--worker-pipeline-parallel", "2", "--roles", "prefill,decode").gpus == ("5,2", "GPU-a,7")
    assert read("--workers", "1", "--tensor-parallel", "4").gpus == ()
    assert read("--workers", "2", "--tensor-parallel", "4", "--worker-device", "cpu").gpus == ()
    with pytest.raises(CliError, match="--workers 2 of 4 ranks each need 8 GPUs: there are 5 here"):
        read("--workers", "2", "--tensor-parallel", "2", "--worker-pipeline-parallel", "2")
    assert read("--workers", "6").gpus == (), "workers of one rank share them"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert read("--workers", "2", "--tensor-parallel", "2").gpus == ()


def test_gpus_are_asked_for_by_their_unique_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho GPU-1\necho GPU-2\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert read("--workers", "2").gpus == ("GPU-1", "GPU-2")
    program.write_text("#!/bin/sh\nexit 9\n")
    assert read("--workers", "2", "--tensor-parallel", "2").gpus == ()


async def test_a_worker_is_started_with_its_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sapwood_stand_in.py").write_text("import os\nprint('sees', os.environ.get('CUDA_VISIBLE_DEVICES'))\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    services = read("--workers", "2", "--tensor-parallel", "2")
    services = replace(services, worker=replace(services.worker, name="stand_in"))
    lines: list[tuple[str, str]] = []
    cluster = Cluster(services, lambda name, line: lines.append((name, line)), lambda line: None)
    children = [await cluster._start_worker(index) for index in range(2)]
    await asyncio.gather(*(child.exited.wait() for child in children))
    assert sorted(lines) == [("worker-0", "sees 0,1"), ("worker-1", "sees 2,3")]
