"""What a model's first start on a machine compiles side by side."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sapwood_common.contract.sampling import SamplingParams
from sapwood_kernels.compiled.side_by_side import Kernel
from sapwood_testing.worker.eager_graphs import EagerGraphs, with_graphs
from sapwood_testing.worker.split_models import SHAPE
from sapwood_testing.worker.steps import Part, step_for
from sapwood_worker.model.distributed.torch_group import join_groups
from sapwood_worker.model.runner import ahead_of_time, builder
from sapwood_worker.model.runner.ahead_of_time import AheadOfTimeKernels
from sapwood_worker.model.runner.builder import build_runner
from sapwood_worker.model.runner.model_runner import ModelRunner
from sapwood_worker.model.runner.options import RunnerOptions
from sapwood_worker.records.step import Step


class FakeCompilers:
    def __init__(self, count: int, capability: tuple[int, int]) -> None:
        self.count, self.capability = count, capability
        self.kernels: list[Kernel] = []
        self.closed = False

    def compile(self, kernels: Sequence[Kernel], tell: Callable[[str], None]) -> None:
        self.kernels += kernels

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Any:
    """A GPU, as far as the choice goes."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(ahead_of_time, "Compilers", FakeCompilers)
    monkeypatch.setattr(ahead_of_time, "this_machine", lambda: {"compute capability": "9.0"})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return SimpleNamespace(device=torch.device("cuda"))


def test_a_start_like_one_before_compiles_nothing_ahead(tiny_model: Any, machine: Any) -> None:
    options = RunnerOptions(model_path=tiny_model("llama").path, num_pages=32)
    first = AheadOfTimeKernels.begin(options, machine, cores=16)
    assert first is not None and first._compilers.count == 8
    assert AheadOfTimeKernels.begin(options, machine, cores=16) is not None  # the first has not ended
    first.remember()
    assert AheadOfTimeKernels.begin(options, machine, cores=16) is None
    built = RunnerOptions(model_path=options.model_path, num_pages=32, load_format="dummy", kernels_wait=False)
    assert AheadOfTimeKernels.begin(built, machine, cores=16) is None
    other = RunnerOptions(model_path=options.model_path, num_pages=32, kv_cache_dtype="fp8_e4m3")
    assert AheadOfTimeKernels.begin(other, machine, cores=16) is not None


def test_a_start_that_came_to_its_end_is_remembered(
    tiny_model: Any, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, begun = AheadOfTimeKernels.begin, []

    def on_a_gpu(options: RunnerOptions, ops: Any) -> AheadOfTimeKernels | None:
        begun.append(begin(options, machine, cores=16))
        return begun[-1]

    monkeypatch.setattr(AheadOfTimeKernels, "begin", on_a_gpu)
    monkeypatch.setattr(AheadOfTimeKernels, "compile", lambda self, rehearse, ranks: None)
    options = RunnerOptions(model_path=tiny_model("llama").path, num_pages=32, max_running=4, threads=1)
    for _ in range(2):
        build_runner(options)
    assert [each is None for each in begun] == [False, True]


def over_ranks(rank: int, path: Path, folder: Path) -> None:
    """A process: a rank that builds its part as on a GPU, where the first rehearses alone; keeps what it says of a prompt."""
    torch.set_num_threads(1)
    parallel = join_groups(rank, tensor=2, rendezvous=f"file://{folder}/meeting", backend="gloo", timeout=60)
    begin, rehearse = AheadOfTimeKernels.begin, builder._Builder._rehearse
    rehearsed = []

    def rehearsed_here(self: Any) -> None:
        rehearse(self)
        rehearsed.append(rank)

    device = SimpleNamespace(device=torch.device("cuda"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(folder / "triton"))
        patch.setattr(ahead_of_time, "Compilers", FakeCompilers)
        patch.setattr(ahead_of_time, "this_machine", dict)
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        patch.setattr(AheadOfTimeKernels, "begin", lambda options, ops: begin(options, device, cores=16))
        patch.setattr(builder._Builder, "_rehearse", rehearsed_here)
        runner = build_runner(
            RunnerOptions(
                model_path=path, num_pages=32, max_running=4, threads=1, max_step_tokens=64, parallel=parallel
            )
        )
    assert rehearsed == [0] * (rank == 0)
    torch.save(runner.logits(prompt(runner)), folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def prompt(runner: ModelRunner) -> Step:
    table = np.arange(4, dtype=np.int32).reshape(1, 4)
    return step_for(runner.info, 0, table, [Part(0, [3, 5, 7, 9], 0, True, SamplingParams())])


@pytest.mark.slow
def test_of_ranks_that_share_layers_the_first_rehearses_alone_for_all(tiny_model: Any, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    path = tiny_model("llama", **SHAPE).path
    torch.multiprocessing.spawn(over_ranks, (path, tmp_path), nprocs=2)
    alone = build_runner(RunnerOptions(model_path=path, num_pages=32, max_running=4, threads=1))
    expected = alone.logits(prompt(alone))
    for rank in range(2):
        assert torch.allclose(torch.load(tmp_path / f"{rank}.pt"), expected, atol=1e-4)


def test_a_start_after_a_kernel_has_changed_looks_again(
    tiny_model: Any, machine: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    source = tmp_path / "kernels" / "attention" / "kernel.py"
    source.parent.mkdir(parents=True)
    source.write_text("a = 1")
    monkeypatch.setattr(ahead_of_time, "_SOURCES", tmp_path / "kernels")
    options = RunnerOptions(model_path=tiny_model("llama").path)
    first = AheadOfTimeKernels.begin(options, machine, cores=16)
    assert first is not None
    first.remember()
    assert AheadOfTimeKernels.begin(options, machine, cores=16) is None
    source.write_text("a = 2")
    assert AheadOfTimeKernels.begin(options, machine, cores=16) is not None


def test_a_start_that_finds_all_kernels_compiled_waits_for_no_process(tiny_model: Any, machine: Any) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    ahead = AheadOfTimeKernels.begin(RunnerOptions(model_path=tiny_model("llama").path), machine, cores=16)
    assert ahead is not None
    ahead._compilers.compile = lambda *_: pytest.fail("it waits for them")
    ahead.compile(lambda: None)
    assert ahead._compilers.closed


def test_processes_that_would_take_each_others_core_are_not_begun(tiny_model: Any, machine: Any) -> None:
    options = RunnerOptions(model_path=tiny_model("llama").path)
    assert AheadOfTimeKernels.begin(options, machine, cores=3) is None
    assert AheadOfTimeKernels.begin(options, SimpleNamespace(device=torch.device("cpu")), cores=16) is None


def test_a_rehearsal_that_fails_is_said_and_ends_the_processes(
    tiny_model: Any, machine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    ahead = AheadOfTimeKernels.begin(RunnerOptions(model_path=tiny_model("llama").path), machine, cores=16)
    assert ahead is not None

    def rehearse() -> None:
        raise RuntimeError("no memory")

    with caplog.at_level(logging.WARNING):
        ahead.compile(rehearse)
    assert "compiled one after another: no memory" in caplog.text
    assert ahead._compilers.closed


def test_decode_steps_are_computed_once_each_where_nothing_is_captured(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[int] = []
    step = EagerGraphs._step

    def counted(self: EagerGraphs, size: int, plan: Any) -> Any:
        computed.append(size)
        return step(self, size, plan)

    monkeypatch.setattr(EagerGraphs, "_step", counted)
    runner = build_runner(RunnerOptions(model_path=tiny_model("llama").path, num_pages=32, max_running=4, threads=1))
    graphs = with_graphs(runner, [1, 2, 4], capture=False)
    assert computed == [4, 2, 1]
    assert not graphs._captured
