"""Products in pieces, of which one is summed over the ranks while the next is multiplied."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast, get_args

import pytest
import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor

from sapwood_kernels.ops.factory import device_ops
from sapwood_testing.worker.split_models import SHAPE, load, logits_of
from sapwood_testing.worker.thread_ranks import ThreadGroup, run_ranks
from sapwood_worker.model.distributed import overlap as module
from sapwood_worker.model.distributed.all_reduce import AllReduce, Choice, SumMethod
from sapwood_worker.model.distributed.overlap import (
    Aside,
    CutKind,
    Overlap,
    SideStream,
    SideThread,
    best_table,
    counts_tried,
    sizes_tried,
)
from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.model.distributed.torch_group import TorchGroup, join_groups
from sapwood_worker.model.families.family import attention_layout
from sapwood_worker.model.layers.aux_hidden_states import AuxiliaryHiddenStates
from sapwood_worker.model.runner import overlap_trial
from sapwood_worker.model.runner.kv_calibration import TrialPlan
from sapwood_worker.model.runner.overlap_trial import overlap_sums
from sapwood_worker.records.model_info import OVERLAPPED, SumChoices

TOKENS = [3 + i * 7 % 90 for i in range(23)]


@pytest.mark.parametrize("with_residual", [False, True])
def test_a_sum_is_begun_before_the_next_product_and_awaited_after_the_last(with_residual: bool) -> None:
    said: list[str] = []

    def aside(call: Callable[[], object]) -> Callable[[], object]:
        said.append("begun")

        def wait() -> None:
            said.append("awaited")
            call()  # not before it is waited for

        return wait

    def product(x: Tensor) -> Tensor:
        said.append(f"product of {len(x)}")
        return x @ torch.ones(3, 2)

    overlap = Overlap(lambda x: x.mul_(2), aside)
    residual = torch.full((7, 2), 5.0) if with_residual else None
    x = torch.arange(21.0).view(7, 3)
    result = overlap.run(product, x.tensor_split(3), residual)
    pieces = [f"product of {rows}" for rows in (3, 2, 2)]
    assert said == [word for piece in pieces for word in (piece, "begun")] + ["awaited"] * 3
    assert torch.equal(result, 2 * product(x) + (5.0 if with_residual else 0.0))
    assert residual is None or result is residual
    assert overlap.summed == 3


def test_a_thread_sums_in_order_and_says_what_failed() -> None:
    aside, done = SideThread(), []
    waits = [aside(lambda each=each: done.append(each)) for each in range(50)]
    for wait in waits:
        wait()
    assert done == list(range(50))
    with pytest.raises(ZeroDivisionError):
        aside(lambda: 1 / 0)()


def test_a_stream_waits_for_the_product_and_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            said.append(f"{self.name} waits for {other.name}")

        def record_event(self) -> str:
            said.append(f"{self.name} records")
            return f"what {self.name} recorded"

        def wait_event(self, event: str) -> None:
            said.append(f"{self.name} waits for {event}")

    main = Stream("main")
    current = [main]

    @contextmanager
    def on(stream: Stream) -> Any:
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: Stream("side"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", on)
    aside = SideStream(torch.device("cuda", 0))
    overlap = Overlap(lambda x: said.append(f"sum on {current[-1].name}"), aside)

    def product(x: Tensor) -> Tensor:
        said.append(f"product on {current[-1].name}")
        return x.clone()

    overlap.run(product, torch.ones(4, 1).tensor_split(2), None)
    piece = ["product on main", "side waits for main", "sum on side", "side records"]
    assert said == piece * 2 + ["main waits for what side recorded"] * 2


def test_products_are_cut_where_that_is_clearly_quicker() -> None:
    assert sizes_tried(511) == []
    assert sizes_tried(2047) == [512, 1024]
    assert sizes_tried(100_000) == [512, 1024, 2048, 4096, 8192]
    assert [counts_tried(rows) for rows in (512, 1024, 2048)] == [[1, 2], [1, 2, 4], [1, 2, 4]]
    seconds = {512: (1.0, 0.96), 1024: (2.0, 1.8, 1.79), 2048: (4.0, 3.5, 3.6), 4096: (8.0, 7.0, 6.0)}
    table = best_table(
        [(rows, count, each) for rows, of in seconds.items() for count, each in zip((1, 2, 4), of, strict=False)]
    )
    assert table == [(1024, 2), (4096, 4)]
    overlap = Overlap(lambda x: x, SideThread())
    assert overlap.words == ""
    overlap.cut(table)
    assert [overlap.pieces(rows) for rows in (1, 1023, 1024, 4095, 4096, 99_999)] == [1, 1, 2, 2, 4, 4]
    assert overlap.words == "products of 1024 tokens and more in 2 pieces, of 4096 tokens and more in 4 pieces"
    back = best_table([(512, 1, 1.0), (512, 2, 0.5), (1024, 1, 1.0), (1024, 2, 1.0)])
    assert back == [(512, 2), (1024, 1)]
    assert best_table([(512, 1, 1.0), (512, 2, 0.5), (1024, 1, 1.0), (1024, 2, 0.5)], 700) == [
        (512, 2),
        (701, 1),
        (1024, 2),
    ]
    assert best_table([(512, 1, 1.0), (512, 2, 0.5)], 700) == [(512, 2), (701, 1)]
    assert best_table([(512, 1, 1.0), (512, 2, 1.0), (1024, 1, 1.0), (1024, 2, 0.5)], 700) == [(1024, 2)]
    overlap.cut(back)
    assert overlap.words == "products of 512 tokens and more in 2 pieces"
    assert sizes_tried(8191, "layers of experts") == [2048, 4096]
    overlap.cut([(2048, 4)], "layers of experts")
    assert [overlap.pieces(rows, "layers of experts") for rows in (2047, 2048)] == [1, 4]
    assert overlap.words.endswith("in 2 pieces; beside layers of experts of 2048 tokens and more in 4 pieces")


def cut(group: ThreadGroup, rows: int, count: int, aside: Aside | None = None) -> Overlap:
    """Has products and experts of so many tokens computed in so many pieces."""
    group.overlap = Overlap(group.all_reduce, aside or SideThread())
    for kind in get_args(CutKind):
        group.overlap.cut([(rows, count)], kind)
    return group.overlap


@pytest.mark.parametrize(
    ("name", "whole_experts"),
    [*((name, False) for name in ("llama", "llama-biased-tied", "gemma3", "mixtral", "gpt-oss")),
     *((name, True) for name in ("deepseek-v3", "qwen2-moe"))],
)  # fmt: skip
def test_logits_are_those_of_whole_products(tiny_model: Any, name: str, whole_experts: bool) -> None:
    path = tiny_model(name, **SHAPE).path

    def work(pieces: int) -> Callable[[ThreadGroup], tuple[Tensor, int, Tensor | None]]:
        def run(group: ThreadGroup) -> tuple[Tensor, int, Tensor | None]:
            overlap = cut(group, len(TOKENS), pieces)
            parallel = Parallel(tp=group, ep=group) if whole_experts else Parallel(tp=group)
            loaded = load(path, parallel)
            found = logits_of(loaded, TOKENS, parallel)
            return found, overlap.summed, loaded.model.expert_tokens() if loaded.config.sparse else None

        return run

    whole = run_ranks(2, work(1))
    for (logits, summed, tokens), (expected, none, of_whole) in zip(run_ranks(2, work(3)), whole, strict=True):
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
        assert (summed, none) == (3 * 2 * load(path).config.num_layers, 0)
        assert tokens is None or (of_whole is not None and torch.equal(tokens, of_whole))


def test_experts_that_may_move_are_not_cut(tiny_model: Any) -> None:
    path = tiny_model("qwen2-moe", **SHAPE).path

    def work(pieces: int) -> Callable[[ThreadGroup], tuple[Tensor, int]]:
        def run(group: ThreadGroup) -> tuple[Tensor, int]:
            overlap = cut(group, len(TOKENS), pieces)
            parallel = Parallel(tp=group, ep=group, redundant_experts=2)
            return logits_of(load(path, parallel), TOKENS, parallel), overlap.summed

        return run

    for (logits, summed), (expected, _) in zip(run_ranks(2, work(3)), run_ranks(2, work(1)), strict=True):
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
        assert summed == 3 * load(path).config.num_layers  # those of attention


def test_attention_beside_experts_that_may_move_is_cut_as_other_products(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FEWEST_ROWS", 2)
    monkeypatch.setattr(overlap_trial, "best_table", lambda seconds, captured: [(8, 2)])
    path = tiny_model("qwen2-moe", **SHAPE).path

    def work(group: ThreadGroup) -> tuple[str, int]:
        parallel = Parallel(tp=group, ep=group, redundant_experts=2)
        loaded = load(path, parallel)
        group.sums = AllReduce([Choice(math.inf, cast(SumMethod, Backend(group)))])
        overlap_sums(parallel, loaded.model, device_ops("cpu"), torch.float32, 16)
        assert group.overlap is not None
        logits_of(loaded, TOKENS, parallel)
        return group.overlap.words, group.overlap.summed

    layers = load(path).config.num_layers
    assert run_ranks(2, work) == [("products of 8 tokens and more in 2 pieces", 2 * layers)] * 2


class TellingAside(SideThread):
    """Attributes: said: Which sums were begun and awaited, by their number, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def __call__(self, call: Callable[[], object]) -> Callable[[], object]:
        number = sum(word.startswith("begun") for word in self.said)
        self.said.append(f"begun {number}")
        wait = super().__call__(call)

        def told() -> object:
            self.said.append(f"awaited {number}")
            return wait()

        return told


@pytest.mark.parametrize("name", ["llama", "mixtral", "deepseek-v3"])
def test_a_layer_goes_on_with_rows_whose_sums_have_come(tiny_model: Any, name: str) -> None:
    path = tiny_model(name, **SHAPE, num_hidden_layers=2).path

    def work(group: ThreadGroup) -> list[str]:
        aside = TellingAside()
        cut(group, len(TOKENS), 3, aside)
        logits_of(load(path, Parallel(tp=group)), TOKENS, Parallel(tp=group))
        return aside.said

    def begun(first: int) -> list[str]:
        return [f"begun {first + piece}" for piece in range(3)]

    def awaited(first: int) -> list[str]:
        return [f"awaited {first + piece}" for piece in range(3)]

    def in_turn(sums: int, products: int) -> list[str]:
        return [word for pair in zip(awaited(sums), begun(products), strict=True) for word in pair]

    layers = [*begun(0), *in_turn(0, 3), *awaited(3), *begun(6), *in_turn(6, 9), *awaited(9)]
    assert run_ranks(2, work) == [layers, layers]


def test_who_looks_between_layers_sees_them_complete(tiny_model: Any) -> None:
    path = tiny_model("llama", **SHAPE, num_hidden_layers=3).path

    def work(pieces: int) -> Callable[[ThreadGroup], tuple[Tensor, Tensor]]:
        def run(group: ThreadGroup) -> tuple[Tensor, Tensor]:
            cut(group, len(TOKENS), pieces)
            parallel = Parallel(tp=group)
            loaded = load(path, parallel)
            width, slots = loaded.config.hidden_size, 64
            store = torch.zeros(slots, 2 * width)
            loaded.model.aux_hidden_states = AuxiliaryHiddenStates([1, 2], lambda seen: seen, store)
            logits_of(loaded, TOKENS, parallel)
            loaded.model.aux_hidden_states = None
            layout = attention_layout(loaded.config, "float32", page_size=16).shard(2)
            with torch.inference_mode():
                hidden = loaded.model.embed(torch.tensor(TOKENS))
                plan = TrialPlan(layout, len(TOKENS), torch.float32, torch.device("cpu"))
                return loaded.model.run_layer(0, hidden, plan).clone(), store

        return run

    for found, expected in zip(run_ranks(2, work(3)), run_ranks(2, work(1)), strict=True):
        for each, whole in zip(found, expected, strict=True):
            assert float(whole.abs().max()) > 0
            torch.testing.assert_close(each, whole, rtol=1e-5, atol=1e-5 * float(whole.abs().max()))


@pytest.mark.parametrize("name", ["llama", "deepseek-v3"])
def test_ranks_choose_alike_by_the_slowest(tiny_model: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(module, "_FEWEST_ROWS", 4)
    path = tiny_model(name, **SHAPE).path

    def work(group: ThreadGroup) -> tuple[str, dict[str, int]]:
        parallel = Parallel(tp=group)
        overlap_sums(parallel, load(path, parallel).model, device_ops("cpu"), torch.float32, 32)
        assert group.overlap is not None
        return group.overlap.words, group.counts()

    first, second = run_ranks(2, work)
    assert first == second
    assert first[1] == {"overlapped": 0}


class SpoiledSums(SideThread):
    """Sums that are written to once more after they are there."""

    def __call__(self, call: Any) -> Callable[[], object]:
        wait = super().__call__(call)

        def spoil() -> None:
            wait()
            call.args[0][-1, -1] += 1

        return spoil


class Backend:
    name, most_bytes = "backend", math.inf

    def __init__(self, group: ThreadGroup) -> None:
        self.sum = group.all_reduce

    def replayed(self) -> int | None:
        return None


@pytest.mark.parametrize("wrong_rank", [None, 1])
@pytest.mark.parametrize(("name", "kind"), [("llama", "products"), ("mixtral", "layers of experts")])
def test_pieces_are_left_out_on_all_ranks_where_one_sums_wrongly(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch, wrong_rank: int | None, name: str, kind: str
) -> None:
    asides: dict[int, SideThread] = {}
    monkeypatch.setattr(module, "_FEWEST_ROWS", 2)
    monkeypatch.setattr(overlap_trial, "best_table", lambda seconds, captured: [(8, 2)])
    monkeypatch.setattr(overlap_trial, "SideThread", lambda: asides[threading.get_ident()])
    path = tiny_model(name, **SHAPE).path
    words = f"{kind} of 8 tokens and more in 2 pieces" if wrong_rank is None else ""

    def work(group: ThreadGroup) -> tuple[str, SumChoices, dict[str, int]]:
        asides[threading.get_ident()] = SpoiledSums() if group.rank == wrong_rank else SideThread()
        parallel = Parallel(tp=group)
        loaded = load(path, parallel)
        group.sums = AllReduce([Choice(math.inf, cast(SumMethod, Backend(group)))])
        overlap_sums(parallel, loaded.model, device_ops("cpu"), torch.float32, 16)
        logits_of(loaded, TOKENS, parallel)
        assert group.overlap is not None
        return group.overlap.words, group.report, group.counts()

    found = run_ranks(2, work)
    layers = load(path).config.num_layers
    for told, report, counts in found:
        assert told == words
        assert counts[OVERLAPPED] == (2 * 2 * layers if words else 0)
        if words:
            assert (report.told, report.refused) == (f"backend; beside {words}", ())
        else:
            [(refused, why)] = report.refused
            assert refused == OVERLAPPED
            assert why.startswith("rank 1: its sum in pieces of ")
            assert report.told == f"backend; overlapped is not used: {why}"


def over_processes(rank: int, folder: Path, path: Path, expert: int) -> None:
    """A process: logits of a model's part whose products are cut."""
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    parallel = join_groups(rank, tensor=2, expert=expert, rendezvous=meeting, backend="gloo", timeout=60)
    group = parallel.tp
    assert isinstance(group, TorchGroup)
    loaded = load(path, parallel)
    overlap_sums(parallel, loaded.model, device_ops("cpu"), torch.float32, 512)  # whatever it finds
    group.overlap = Overlap(group.all_reduce, SideThread())
    for kind in get_args(CutKind):
        group.overlap.cut([(8, 4)], kind)
    torch.save((logits_of(loaded, TOKENS, parallel), group.counts()["overlapped"]), folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "expert"), [("llama", 1), ("deepseek-v3", 2)])
def test_processes_over_gloo_give_the_logits_of_one(tiny_model: Any, tmp_path: Path, name: str, expert: int) -> None:
    path = tiny_model(name, **SHAPE).path
    multiprocessing.spawn(over_processes, (tmp_path, path, expert), nprocs=2)
    whole = load(path)
    expected = logits_of(whole, TOKENS)
    for rank in range(2):
        logits, summed = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(logits, expected, rtol=2e-5, atol=2e-5 * float(expected.abs().max()))
        assert summed == 4 * 2 * whole.config.num_layers
