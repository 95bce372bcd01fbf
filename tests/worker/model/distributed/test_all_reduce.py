"""Sums over ranks that share memory: exact, equal on all ranks, and chosen by what is quickest. Ranks are threads here."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor

from sapwood_common.errors import ConfigError
from sapwood_kernels.native.products import load_library
from sapwood_kernels.ops.factory import device_ops
from sapwood_testing.worker.thread_ranks import ThreadGroup, run_ranks
from sapwood_worker.model.distributed import shared_memory_all_reduce
from sapwood_worker.model.distributed.all_reduce import AllReduce, Choice, add_up
from sapwood_worker.model.distributed.calibration import Trial, as_it_is, time_on_host
from sapwood_worker.model.distributed.custom_all_reduce import choose_sums
from sapwood_worker.model.distributed.shared_memory_all_reduce import OneShot, SharedMemoryAllReduce, TwoShot
from sapwood_worker.model.distributed.torch_group import TorchGroup, join_groups
from sapwood_worker.records.model_info import SUM_SIZES

LIBRARY = load_library()
CPU = torch.device("cpu")
needs_library = pytest.mark.skipif(LIBRARY is None, reason="nothing is compiled: python hatch_build.py")


def shared(group: ThreadGroup) -> SharedMemoryAllReduce:
    assert LIBRARY is not None
    return SharedMemoryAllReduce(group, LIBRARY, 60.0)


def values(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype)


@needs_library
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("method", [OneShot, TwoShot])
def test_sums_are_those_of_the_ranks_in_order_to_the_bit(size: int, method: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(shared_memory_all_reduce, "_SLOT_BYTES", 4096)  # so that some go in pieces
    shapes = [(count, dtype) for dtype in (torch.float32, torch.bfloat16) for count in (1, 5, 1024, 2500)]

    def work(group: ThreadGroup) -> list[Tensor]:
        sums = method(shared(group))
        found = []
        for count, dtype in shapes * 2:
            found.append(values(group.rank, count, dtype))
            sums.sum(found[-1])
        across = values(group.rank, 24, torch.float32).view(4, 6).T  # not contiguous
        sums.sum(across)
        return [*found, across]

    results = run_ranks(size, work)
    for rank in range(size):
        *found, across = results[rank]
        for (count, dtype), ours in zip(shapes * 2, found, strict=True):
            expected = torch.empty(count, dtype=dtype)
            add_up([values(each, count, dtype) for each in range(size)], expected)
            assert torch.equal(ours, expected)
        total = values(0, 24, torch.float32)
        for each in range(1, size):
            total += values(each, 24, torch.float32)
        assert torch.equal(across, total.view(4, 6).T)


def test_sums_of_few_bits_are_rounded_once() -> None:
    parts = [torch.tensor([value], dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]  # 257 is no bfloat16
    result = torch.empty(1, dtype=torch.bfloat16)
    add_up(parts, result)
    assert result.item() == 258.0


@needs_library
def test_ranks_gather_what_does_not_fit_in_a_slot(monkeypatch: Any) -> None:
    monkeypatch.setattr(shared_memory_all_reduce, "_SLOT_BYTES", 64)

    def work(group: ThreadGroup) -> Tensor:
        return shared(group).gather(torch.arange(60.0).view(3, 20)[:, :7] + 100 * group.rank)

    expected = torch.stack([torch.arange(60.0).view(3, 20)[:, :7] + 100 * rank for rank in range(3)])
    assert all(torch.equal(found, expected) for found in run_ranks(3, work))


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_get_the_sums_of_their_own_rows(dtype: torch.dtype, monkeypatch: Any) -> None:
    monkeypatch.setattr(shared_memory_all_reduce, "_SLOT_BYTES", 64)
    parts = [values(rank, 3 * 5 * 7, dtype).view(15, 7) for rank in range(3)]
    expected = torch.empty(15, 7, dtype=dtype)
    add_up(parts, expected)
    found = run_ranks(3, lambda group: OneShot(shared(group)).scatter_sum(parts[group.rank]))
    assert torch.equal(torch.cat(found), expected)


@needs_library
def test_a_rank_that_does_not_come_is_named(monkeypatch: Any) -> None:
    monkeypatch.setattr(shared_memory_all_reduce, "_LOOK_SECONDS", 0.01)

    def work(group: ThreadGroup) -> str:
        parts = SharedMemoryAllReduce(group, LIBRARY, 0.02)  # type: ignore[arg-type]
        if group.rank == 1:
            return ""
        with pytest.raises(RuntimeError, match="rank 1 of 3 has not come"):
            parts.wait()
        return "said"

    assert run_ranks(3, work) == ["said", "", "said"]


class Named:
    """A method of a name, whose sums may be wrong on one rank."""

    def __init__(self, group: ThreadGroup, name: str, wrong: int = -1, most: float = math.inf) -> None:
        self.name, self.most_bytes = name, most
        self._group, self._wrong = group, wrong

    def sum(self, x: Tensor) -> None:
        self._group.all_reduce(x)
        if self._group.rank == self._wrong:
            x[-1] += 1

    def gather(self, x: Tensor) -> Tensor:
        return self._group.gather_rows(x[None])

    def scatter_sum(self, x: Tensor) -> Tensor:
        return self._group.reduce_scatter(x)

    def replayed(self) -> int | None:
        return None


def trial(group: ThreadGroup, timer: Any = time_on_host) -> Trial:
    return Trial(group, device_ops("cpu"), [torch.float32], timer=timer, replay=as_it_is)


def chosen(
    make: Any, name: str = "auto", size: int = 2, timer: Any = time_on_host
) -> list[tuple[str, Sequence[Any], AllReduce]]:
    """What each rank takes of the methods that ``make`` gives it; the backend is one of them."""

    def work(group: ThreadGroup) -> tuple[str, Sequence[Any], AllReduce]:
        backend, *own = make(group)
        table = trial(group, timer).choose(name, backend, {each.name: each for each in own})
        return table.report.words, table.report.times, table

    return run_ranks(size, work)


def slow_and_quick(group: ThreadGroup) -> list[Named]:
    return [Named(group, "backend"), Named(group, "one-shot"), Named(group, "two-shot")]


def test_each_size_gets_what_is_quickest_on_the_slowest_rank(monkeypatch: Any) -> None:
    # In the order in which they are measured: methods within sizes. Rank 1 says other seconds of one-shot than rank 0.
    of_size = {4096: (9, 1, 2), 16384: (9, 1, 2), 65536: (9, 3, 2.9), 262144: (9, 5, 2), 1048576: (9, 9, 2)}

    def work(group: ThreadGroup) -> str:
        seconds = iter(of_size.get(size, (1, 9, 9))[place] for size in SUM_SIZES for place in range(3))

        def timer(call: Any) -> float:
            given = next(seconds)
            return given if group.rank else min(given, 1.5)

        backend, *own = slow_and_quick(group)
        table = trial(group, timer).choose("auto", backend, {each.name: each for each in own})
        assert table.method(4096).name == "one-shot"
        assert table.method(4097).name == "one-shot"
        assert table.method(1 << 40).name == "backend"
        return table.report.words

    # At 64 KiB two-shot is quicker, but not clearly.
    assert run_ranks(2, work) == ["one-shot up to 64 KiB, two-shot up to 1024 KiB, backend above"] * 2


def test_a_method_whose_sums_are_wrong_on_one_rank_is_used_on_none(caplog: Any) -> None:
    def make(group: ThreadGroup) -> list[Named]:
        return [Named(group, "backend"), Named(group, "one-shot", wrong=1)]

    assert [words for words, _, _ in chosen(make)] == ["backend"] * 2
    assert "one-shot is not used: rank 1: its sum of 1 numbers of torch.float32 was wrong" in caplog.text
    with pytest.raises(ConfigError, match="--all-reduce one-shot: it cannot be used here"):
        chosen(make, "one-shot")


def test_a_methods_first_result_of_a_size_is_not_judged_while_ranks_compile() -> None:
    class Compiled(Named):
        seen: set[int] = set()  # noqa: RUF012 - both ranks'

        def sum(self, x: Tensor) -> None:
            super().sum(x)
            if self._group.rank and len(x) not in self.seen:
                self.seen.add(len(x))
                x += 1

    def make(group: ThreadGroup) -> list[Named]:
        return [Named(group, "backend"), Compiled(group, "one-shot")]

    assert "one-shot" in {each.method for each in chosen(make)[0][1]}


def test_a_method_that_fails_on_one_rank_is_used_on_none_at_once(caplog: Any) -> None:
    sums: list[int] = []

    class Failing(Named):
        def gather(self, x: Tensor) -> Tensor:
            sums.append(self._group.rank)
            if self._group.rank:
                raise RuntimeError("it does not compile")
            return torch.zeros(2, len(x))  # this rank has given up: the other has not come

        def scatter_sum(self, x: Tensor) -> Tensor:
            return x[:1]

        def sum(self, x: Tensor) -> None:
            pass

    def make(group: ThreadGroup) -> list[Named]:
        return [Named(group, "backend"), Failing(group, "one-shot")]

    assert [words for words, _, _ in chosen(make)] == ["backend"] * 2
    assert sorted(sums) == [0, 1], "the others do not wait for it again and again"
    assert "one-shot is not used: rank 1: RuntimeError: it does not compile" in caplog.text


def test_a_method_that_one_rank_does_not_have_is_used_on_none() -> None:
    def make(group: ThreadGroup) -> list[Named]:
        return slow_and_quick(group)[: 2 + group.rank]

    with pytest.raises(ConfigError, match="--all-reduce two-shot"):
        chosen(make, "two-shot")


def test_a_method_that_is_asked_for_sums_all_that_it_takes() -> None:
    def make(group: ThreadGroup) -> list[Named]:
        return [Named(group, "backend"), Named(group, "one-shot", most=1 << 23)]

    [(words, times, table), _] = chosen(make, "one-shot")
    assert words == "one-shot up to 8192 KiB, backend above"
    assert {each.num_bytes for each in times} == set(SUM_SIZES)
    assert table.counts() == {"one-shot": 0, "backend": 0}


def test_calls_are_counted_by_method() -> None:
    group = ThreadGroup(0, [torch.empty(0)], threading.Barrier(1))
    table = AllReduce([Choice(8, Named(group, "one-shot")), Choice(math.inf, Named(group, "backend"))])
    for count in (1, 2, 3):
        table(torch.zeros(count))
    assert table.counts() == {"one-shot": 2, "backend": 1}


def test_where_ranks_have_rows_of_their_own_it_is_these_that_are_timed() -> None:
    timed: list[int] = []

    class Rows(Named):
        def scatter_sum(self, x: Tensor) -> Tensor:
            timed.append(x.nbytes)
            return super().scatter_sum(x)

    def work(group: ThreadGroup) -> AllReduce:
        own = {name: Rows(group, name) for name in ("one-shot", "two-shot")}
        return trial(group).choose("auto", Rows(group, "backend"), own, own_rows=True)

    tables = run_ranks(2, work)
    assert {each.method for each in tables[0].report.times} == {"backend", "one-shot"}
    assert set(SUM_SIZES) < set(timed)


def over_processes(rank: int, folder: Path) -> None:
    """A process: sums by what it has chosen, and by gloo."""
    torch.set_num_threads(1)
    parallel = join_groups(rank, tensor=2, rendezvous=f"file://{folder}/meeting", backend="gloo", timeout=60)
    choose_sums(parallel, "auto", CPU, 2, 60.0)
    group = parallel.tp
    assert isinstance(group, TorchGroup)
    assert {each.method for each in group.sums.report.times} == {"backend", "one-shot", "two-shot"}
    for count in (1, 700, 300_000, 1_500_000):
        ours, theirs = (values(rank, count, torch.float32) for _ in range(2))
        group.all_reduce(ours)
        group.backend.sum(theirs)
        assert torch.equal(ours, theirs)
        mine = values(rank, 2 * count, torch.float32).view(2, -1)
        assert torch.equal(group.all_gather(mine), torch.cat(group.backend.gather(mine).unbind(), -1))
        assert torch.equal(group.gather_rows(mine), torch.cat(group.backend.gather(mine).unbind()))
        assert torch.equal(group.reduce_scatter(mine), group.backend.scatter_sum(mine))
    (folder / str(rank)).write_text(group.sums.report.words)
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@needs_library
def test_processes_choose_alike_and_sum_as_gloo_does(tmp_path: Path) -> None:
    multiprocessing.spawn(over_processes, (tmp_path,), nprocs=2)
    first, second = ((tmp_path / str(rank)).read_text() for rank in range(2))
    assert first == second
