"""Every benchmark starts: what it imports is there, and it says how it is called."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

_ROOT = Path(__file__).parents[2]
# The other folders hold the processes that these start.
_FOLDERS = ("benchmarks", "benchmarks/gpu", "benchmarks/gpu/checks")
_FILES = sorted(path for folder in _FOLDERS for path in _ROOT.glob(f"{folder}/*.py"))
_PROGRAMS = [path for path in _FILES if "__main__" in path.read_text()]


@pytest.mark.slow
@pytest.mark.parametrize("program", _PROGRAMS, ids=lambda path: str(path.relative_to(_ROOT)))
def test_a_benchmark_says_how_it_is_called(program: Path) -> None:
    told = subprocess.run(
        [sys.executable, program, "--help"], check=True, stdout=subprocess.PIPE, text=True, timeout=300
    )
    assert told.stdout.startswith("usage: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "found"),
    [((), "sampled other tokens than rank 0"), (("--data-parallel-attention",), "got other rows than the others")],
)
def test_a_run_over_ranks_checks_them_against_each_other(tmp_path: Path, flags: tuple[str, ...], found: str) -> None:
    gpu, shape = _ROOT / "benchmarks/gpu", tmp_path / "shape"
    subprocess.run([sys.executable, gpu / "sparse_shape.py", "make", shape, "--gpus", "2"], check=True, timeout=60)
    command = [sys.executable, gpu / "bench_engine.py", "--model", shape, "--device", "cpu", "--tensor-parallel", "2"]
    command += ["--expert-parallel", *flags, "--kv-gb", "0.2", "--only", "prefill", "--prefills", "1x64"]
    sound, diverging = (
        subprocess.run([*command, "--diverging-rank", rank], check=False, capture_output=True, text=True, timeout=300)
        for rank in ("-1", "1")
    )
    assert sound.returncode == 0 and "all ranks" in sound.stdout, sound.stderr
    assert diverging.returncode == 1 and "all ranks" not in diverging.stdout
    assert f"rank 1 diverged: in step 0 it {found}" in diverging.stderr


UNIFORM = """
import sys

import torch

sys.path.insert(0, sys.argv[1])
from uniform_routing import route_uniformly

from sapwood_kernels.experts.routing import Routing
from sapwood_kernels.ops.cuda import CudaOps

routing, kept = Routing(16, 4), CudaOps.router


def chosen(rank, ranks):
    route_uniformly(64, rank)
    route = CudaOps(torch.device("cpu")).router(routing, None, torch.zeros(16, dtype=torch.int64), ranks)
    CudaOps.router = kept
    return route(torch.zeros(8, 16))[0].tolist()


own = [chosen(rank, 1) for rank in range(2)]
assert own[0] != own[1] and own[0] == chosen(0, 2) == chosen(1, 2)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="its tensors are a CPU's, which the interpreter takes")
def test_uniform_routing_chooses_alike_on_all_ranks_and_other_routing_apart() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    interpreted = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", UNIFORM, _ROOT / "benchmarks/gpu"], check=True, env=interpreted, timeout=120)
