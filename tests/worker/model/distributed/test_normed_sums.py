"""Sums that a residual and a norm come after, in one pass where that is quickest. Ranks are threads here, and processes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor

from sapwood_kernels.ops.contracts import Norm
from sapwood_kernels.ops.factory import device_ops
from sapwood_testing.worker.split_models import SHAPE, load, logits_of
from sapwood_testing.worker.thread_ranks import ThreadGroup, run_ranks
from sapwood_worker.model.distributed.all_reduce import AllReduce, Choice
from sapwood_worker.model.distributed.calibration import Trial, as_it_is
from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.model.distributed.torch_group import TorchGroup, join_groups
from sapwood_worker.records.model_info import APART, SUM_SIZES

TOKENS = [3 + i * 7 % 90 for i in range(23)]


class Backend:
    name, most_bytes = "backend", math.inf

    def __init__(self, group: ThreadGroup) -> None:
        self._group = group

    def sum(self, x: Tensor) -> None:
        self._group.all_reduce(x)

    def replayed(self) -> int | None:
        return None


class Normed(Backend):
    """Does all in one; may be wrong on one rank."""

    name, most_bytes = "one-shot+norm", 1 << 20

    def __init__(self, group: ThreadGroup, wrong: Callable[[Tensor, Tensor], object] = lambda residual, normed: None):
        super().__init__(group)
        self._wrong = wrong

    def takes(self, x: Tensor, residual: Tensor) -> bool:
        return x.shape[1] % 2 == 0

    def add(self, x: Tensor, residual: Tensor, norm: Norm) -> Tensor | None:
        residual += self._group.all_reduce(x)
        normed: Tensor = norm(residual).clone()
        self._wrong(residual, normed)
        return normed


def chosen(group: ThreadGroup, name: str = "auto", timer: Any = lambda call: 1.0, **options: Any) -> AllReduce:
    trial = Trial(group, device_ops("cpu"), [torch.float32, torch.bfloat16], timer=timer, replay=as_it_is)
    backend = Backend(group)
    table = AllReduce([Choice(math.inf, backend)])
    method = Normed(group, **options)
    trial.choose_normed(name, table, {method.name: method})
    return table


def test_a_normed_sum_is_taken_for_sizes_where_it_wins_and_counted() -> None:
    def work(group: ThreadGroup) -> tuple[str, dict[str, int], list[bool]]:
        # Sizes in order, apart and in one of each: quicker up to 16 KiB, and as quick above.
        seconds = iter(
            [(9.0, 1.0 if size <= 16384 else 9.0)[each] for size in SUM_SIZES[:5] for each in range(2)] + [9.0]
        )
        table = chosen(group, timer=lambda call: next(seconds))
        norm = torch.nn.RMSNorm(8, elementwise_affine=False)
        found = []
        for shape in ((2, 8), (2048, 8), (512, 8)):
            x, residual = torch.full(shape, 1.0 + group.rank), torch.ones(shape)
            normed = table.add(x, residual, norm)  # type: ignore[arg-type]
            assert torch.equal(residual, torch.full(shape, 4.0))
            found.append(normed is not None and torch.equal(normed, norm(residual)))
        odd = torch.ones(2, 3)
        assert table.add(torch.ones(2, 3), odd, norm) is None  # type: ignore[arg-type]
        assert torch.equal(odd, torch.full((2, 3), 3.0))
        assert [each.seconds for each in table.report.times if each.method == APART] == [9.0] * len(SUM_SIZES)
        return table.report.words, table.counts(), found

    words = "backend; with residual and norm one-shot+norm up to 1024 KiB, apart above"
    for said, counts, found in run_ranks(2, work):
        # One as quick as the method of the size before does not take its place: it continues to what the method takes at most.
        assert said == words
        assert found == [True, True, True]
        assert counts == {"backend": 1, "one-shot+norm": 3}


def test_where_it_does_not_pay_sums_are_apart() -> None:
    def work(group: ThreadGroup) -> tuple[str, bool]:
        seconds = iter([1.0, 2.0] * 5 + [1.0])
        table = chosen(group, timer=lambda call: next(seconds))
        norm = torch.nn.RMSNorm(8, elementwise_affine=False)
        residual = torch.zeros(2, 8)
        normed = table.add(torch.ones(2, 8), residual, norm)  # type: ignore[arg-type]
        return table.report.words, normed is None and bool((residual == 2).all())

    assert run_ranks(2, work) == [("backend; with residual and norm apart", True)] * 2


@pytest.mark.parametrize(("place", "what"), [(0, "sum with a residual"), (1, "norm")])
def test_one_that_is_wrong_on_one_rank_is_used_on_none(place: int, what: str, caplog: Any) -> None:
    def work(group: ThreadGroup) -> str:
        def wrong(*tensors: Tensor) -> None:
            if group.rank == 1:
                tensors[place][-1, -1] += 0.5

        return chosen(group, wrong=wrong).report.words

    assert run_ranks(2, work) == ["backend"] * 2
    assert f"one-shot+norm is not used: rank 1: its {what} of 4096 numbers of torch.float32 was wrong" in caplog.text


def test_only_that_of_the_method_that_is_asked_for_is_tried() -> None:
    assert run_ranks(2, lambda group: chosen(group, "two-shot").report.words) == ["backend"] * 2
    words = run_ranks(2, lambda group: chosen(group, "one-shot").report.words)
    assert words == ["backend; with residual and norm apart"] * 2  # as quick is not quicker


class NormingGroup(ThreadGroup):
    """Norms what it sums, ``factor`` times."""

    factor, normed = 1.0, 0

    def add_sum(self, x: Tensor, residual: Tensor, norm: Norm) -> Tensor | None:
        residual += self.all_reduce(x)
        self.normed += 1
        result: Tensor = norm(residual) * self.factor
        return result


@pytest.mark.parametrize(
    ("name", "own"),
    [("llama", 2), ("qwen3-window", 2), ("mixtral", 2), ("deepseek-v3", 2), ("llama-biased-tied", 2), ("gemma3", 0)],
)
def test_layers_take_what_is_normed_already(tiny_model: Any, name: str, own: int) -> None:
    path = tiny_model(name, **SHAPE).path

    def work(group: ThreadGroup) -> Tensor:
        return logits_of(load(path, Parallel(tp=group)), TOKENS, Parallel(tp=group))

    def norming(factor: float) -> Callable[[ThreadGroup], tuple[Tensor, int]]:
        def work_normed(group: ThreadGroup) -> tuple[Tensor, int]:
            group.__class__ = NormingGroup
            assert isinstance(group, NormingGroup)
            group.factor = factor
            return work(group), group.normed

        return work_normed

    [(ours, times), (other, _)] = run_ranks(2, norming(1.0))
    plain = run_ranks(2, work)[0]
    assert torch.equal(ours, plain)
    assert torch.equal(other, plain)
    layers = load(path).config.num_layers
    biased = name == "llama-biased-tied"  # a bias comes between
    assert times == (0 if biased or not own else own * layers - 1)
    if times:
        assert not torch.equal(run_ranks(2, norming(1.5))[0][0], plain), "what the sums have normed is what layers read"


def over_processes(rank: int, folder: Path, path: Path) -> None:
    """A process: logits of a model's part, summed by the GPU's kernels in Triton's interpreter over memory that ranks share."""
    from sapwood_kernels.ranks.triton_all_reduce import PROGRAMS, PeerAllReduce
    from sapwood_kernels.ranks.triton_row_exchange import RowExchange
    from sapwood_worker.model.distributed.peer_all_reduce import PeerNormedSum, PeerSum

    torch.set_num_threads(1)
    parallel = join_groups(rank, tensor=2, rendezvous=f"file://{folder}/meeting", backend="gloo", timeout=60)
    group = parallel.tp
    assert isinstance(group, TorchGroup)
    most = PROGRAMS * 16 * 2 * 32
    start = PeerAllReduce.region_bytes(most)
    size = start + RowExchange.region_bytes(most, 2)
    maps = [torch.from_numpy(np.memmap(folder / f"region{each}", np.uint8, "r+", shape=size)) for each in range(2)]
    sums = PeerAllReduce([each.data_ptr() for each in maps], rank, most, torch.device("cpu"))
    rows = RowExchange([each.data_ptr() + start for each in maps], rank, most, torch.device("cpu"))
    loaded, found = load(path, parallel), []
    for two_shot in (False, True):
        group.sums = AllReduce([Choice(math.inf, PeerSum(sums, rows, two_shot=two_shot))])
        group.sums.choose_normed([Choice(math.inf, PeerNormedSum(sums, two_shot=two_shot))], ())
        found.append(logits_of(loaded, TOKENS[:5], parallel))
    torch.save((found, group.sums.counts()), folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the memory of the ranks is the host's here")
def test_a_model_over_processes_whose_kernels_sum_and_norm_is_that_of_one(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    path = tiny_model("llama", **SHAPE).path
    for rank in range(2):
        (tmp_path / f"region{rank}").write_bytes(bytes(1 << 22))
    multiprocessing.spawn(over_processes, (tmp_path, path), nprocs=2)
    whole = load(path)
    expected = logits_of(whole, TOKENS[:5])
    sums = 2 * whole.config.num_layers - 1
    for rank in range(2):
        logits, counts = torch.load(tmp_path / f"{rank}.pt")
        assert counts == {"two-shot": 2, "two-shot+norm": sums}  # of embedding and last layer, apart
        for each in logits:
            torch.testing.assert_close(each, expected, rtol=2e-5, atol=2e-5 * float(expected.abs().max()))
