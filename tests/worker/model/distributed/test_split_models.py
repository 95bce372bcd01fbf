"""Models split over ranks give the logits of one process: ranks as threads, and as processes over gloo."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.multiprocessing as multiprocessing

from sapwood_common.errors import ConfigError
from sapwood_testing.worker.split_models import SHAPE, exchange, load, logits_of, rank_process
from sapwood_testing.worker.thread_ranks import ThreadGroup, run_grid, run_ranks
from sapwood_worker.model.checkpoint.safetensors_source import SafetensorsSource
from sapwood_worker.model.distributed.group import Group
from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.model.distributed.torch_group import grid, join_groups
from sapwood_worker.model.loader import LoadedModel
from sapwood_worker.model.weight_slot import Span

TOKENS = [3 + i * 7 % 90 for i in range(23)]
NAMES = [
    "llama",
    "llama-biased-tied",
    "mistral-window",
    "qwen2",
    "qwen3-window",
    "gemma3",
    "mixtral",
    "qwen2-moe",
    "deepseek-v3",
]


def assert_near(ours: torch.Tensor, whole: torch.Tensor, limit: float = 2e-5) -> None:
    assert ours.shape == whole.shape
    assert float((ours - whole).abs().max()) <= limit * float(whole.abs().max())


@pytest.mark.parametrize(
    ("name", "size"), [*((name, 2) for name in NAMES), ("llama-biased-tied", 4), ("llama-biased-tied", 8)]
)
def test_logits_of_ranks_are_those_of_one(tiny_model, name, size):
    path = tiny_model(name, **SHAPE).path
    whole = logits_of(load(path), TOKENS)
    calls = []

    def work(group: ThreadGroup) -> torch.Tensor:
        parallel = Parallel(tp=group)
        loaded = load(path, parallel)
        result = logits_of(loaded, TOKENS, parallel)
        calls.append(group.calls)
        return result

    parts = run_ranks(size, work)
    assert all(torch.equal(each, parts[0]) for each in parts)
    assert_near(parts[0], whole)
    # Two a layer, one for the embedding, one for the logits.
    assert calls == [2 * load(path).config.num_layers + 2] * size


@pytest.mark.parametrize(("name", "tensor", "stages"), [*((name, 1, 2) for name in NAMES), ("llama-biased-tied", 2, 2)])
def test_logits_of_stages_are_those_of_one(tiny_model, name, tensor, stages):
    path = tiny_model(name, **SHAPE).path
    whole = load(path)
    expected = logits_of(whole, TOKENS)

    def work(rank: int, parallel: Parallel) -> tuple[torch.Tensor, range, set[str]]:
        loaded = load(path, parallel)
        return logits_of(loaded, TOKENS, parallel), loaded.model.own, set(loaded.model.weights())

    parts = run_grid(tensor, stages, work)
    names = set(whole.model.weights())
    assert set.union(*(read for _, _, read in parts)) == names
    assert [layer for _, own, _ in parts[::tensor] for layer in own] == list(range(whole.config.num_layers))
    for logits, own, read in parts:
        assert torch.equal(logits, parts[0][0])
        assert_near(logits, expected)
        assert {int(name.split(".")[2]) for name in read if ".layers." in name} == set(own)
        table = not own.start or whole.config.tie_word_embeddings
        assert table == any("embed_tokens" in name for name in read)


@pytest.mark.parametrize(("name", "size"), [("qwen2-moe", 2), ("qwen3-moe", 4), ("gpt-oss", 2), ("deepseek-v3", 2)])
def test_ranks_with_whole_experts_give_the_logits_of_one(tiny_model, name, size):
    path = tiny_model(name, **SHAPE).path
    whole = load(path)
    expected = logits_of(whole, TOKENS)

    def work(group: ThreadGroup) -> tuple[torch.Tensor, int, int]:
        parallel = Parallel(tp=group, ep=group)
        loaded = load(path, parallel)
        result = logits_of(loaded, TOKENS, parallel)
        return result, group.calls, numbers_of_experts(loaded)

    parts = run_ranks(size, work)
    for logits, calls, numbers in parts:
        assert torch.equal(logits, parts[0][0])
        assert_near(logits, expected)
        assert calls == 2 * whole.config.num_layers + 2
        assert numbers * size == numbers_of_experts(whole)


def numbers_of_experts(loaded: LoadedModel) -> int:
    return sum(slot.target.numel() for name, slot in loaded.model.weights().items() if ".experts." in name)


def test_experts_that_cannot_be_handed_out_equally_are_refused(tiny_model):
    path = tiny_model("mixtral", **SHAPE).path
    rank = ThreadGroup(0, [torch.empty(0)] * 2, threading.Barrier(2))
    with pytest.raises(ConfigError, match="--expert-parallel: 5 experts cannot be handed out to 2 ranks"):
        load(path, Parallel(tp=rank, ep=rank))
    dense = tiny_model("llama", **SHAPE).path
    with pytest.raises(ConfigError, match=f"--expert-parallel: {dense} has no experts"):
        load(dense, Parallel(tp=rank, ep=rank))


@pytest.mark.parametrize(("name", "whole_experts"), [("llama", False), ("mixtral", False), ("qwen3-moe", True)])
def test_a_token_meets_an_even_part_of_the_layers_on_each_rank(tiny_model, name, whole_experts):
    path = tiny_model(name, **SHAPE).path

    def work(group: ThreadGroup) -> int:
        parallel = Parallel(tp=group, ep=group) if whole_experts else Parallel(tp=group)
        return load(path, parallel).model.layer_size()

    assert run_ranks(2, work) == [load(path).model.layer_size() / 2] * 2


def test_ranks_quantise_what_they_have(tiny_model):
    quantization = "fp8"
    path = tiny_model("llama", **SHAPE | {"intermediate_size": 64}).path
    whole = logits_of(load(path, quantization=quantization), TOKENS)

    def work(group: ThreadGroup) -> torch.Tensor:
        return logits_of(load(path, Parallel(tp=group), quantization), TOKENS, Parallel(tp=group))

    parts = run_ranks(2, work)
    assert torch.equal(parts[0], parts[1])
    # Scales of half a row round other numbers: near the whole model, as one process is.
    exact = logits_of(load(path), TOKENS)
    assert (parts[0] - exact).norm() < 2 * (whole - exact).norm()


def test_a_rank_reads_and_holds_its_part_only(tiny_model, monkeypatch):
    path = tiny_model("llama", **SHAPE).path
    read: list[str] = []
    whole = SafetensorsSource._read

    def note(self, name):
        read.append(name)
        return whole(self, name)

    monkeypatch.setattr(SafetensorsSource, "_read", note)
    sizes = []
    for size in (1, 2):
        read.clear()
        rank = ThreadGroup(size - 1, [torch.empty(0)] * size, threading.Barrier(size))
        slots = load(path, Parallel(tp=rank)).model.weights()
        sizes.append({name: slot.target.numel() for name, slot in slots.items()})
    assert read
    assert all("norm" in name for name in read)
    for name, count in sizes[0].items():
        kept = 48 * 48 if "embed" in name or "lm_head" in name else count // 2  # the last rank has 48 of 97 rows
        assert sizes[1][name] == (count if "norm" in name else kept), name


def test_more_stages_than_layers_are_refused(tiny_model):
    path = tiny_model("llama", **SHAPE).path
    stages = ThreadGroup(0, [torch.empty(0)] * 9, threading.Barrier(9))
    with pytest.raises(ConfigError, match=r"--pipeline-parallel: \d layers cannot be split over 9 stages"):
        load(path, Parallel(pp=stages))


def test_a_group_of_one_is_never_called(tiny_model):
    class Silent(Group):
        def all_reduce(self, x):
            raise AssertionError

        all_gather = reduce_scatter = broadcast = send = receive = all_reduce

    path = tiny_model("gemma3", **SHAPE).path
    alone = Parallel(tp=Silent(), pp=Silent())
    assert torch.equal(logits_of(load(path, alone), TOKENS, alone), logits_of(load(path), TOKENS))


def test_parts_are_even_and_key_heads_are_shared_where_there_are_fewer_than_ranks():
    def parts(size, *arguments, **options):
        ranks = [ThreadGroup(rank, [torch.empty(0)] * size, threading.Barrier(size)) for rank in range(size)]
        return [Parallel(tp=rank).shard("heads", *arguments, **options) for rank in ranks]

    assert parts(2, 8, 16) == [Span(0, 64, 128), Span(64, 64, 128)]
    assert parts(4, 2, 16, copies=True) == [Span(0, 16, 32), Span(0, 16, 32), Span(16, 16, 32), Span(16, 16, 32)]
    for count, options in ((6, {}), (2, {}), (3, {"copies": True})):
        with pytest.raises(ConfigError, match=f"--tensor-parallel 4: heads is {count}, which cannot be split"):
            parts(4, count, **options)


def test_exchanges_of_threads_and_of_one():
    assert run_ranks(2, lambda group: exchange(group, 5.0 + group.rank))[1] == {
        "sum": [11.0], "all": [5.0, 6.0], "mine of the sum": [13.0], "last's": [6.0]
    }  # fmt: skip
    assert exchange(Group(), 5.0) == {"sum": [5.0], "all": [5.0], "mine of the sum": [5.0], "last's": [5.0]}


def test_ranks_of_a_tensor_parallel_group_are_neighbours():
    assert grid(2, 2, 2, 4) == {
        "tp": [[0, 1], [2, 3], [4, 5], [6, 7]],
        "pp": [[0, 2], [1, 3], [4, 6], [5, 7]],
        "dp": [[0, 4], [1, 5], [2, 6], [3, 7]],
        "ep": [[0, 1, 4, 5], [2, 3, 6, 7]],
    }


def test_sizes_that_do_not_fit_and_ranks_that_do_not_come_are_errors(tmp_path):
    options = {"rendezvous": f"file://{tmp_path}/alone", "backend": "gloo", "timeout": 0.1}
    with pytest.raises(ConfigError, match="rank 2 of tensor 2 x pipeline 1 x data 1, expert 1: the sizes do not fit"):
        join_groups(2, tensor=2, **options)
    with pytest.raises(ConfigError, match="expert 3: the sizes do not fit"):
        join_groups(0, tensor=2, expert=3, **options)
    with pytest.raises(ConfigError, match=r"rank 0 of 2 did not meet the others at file://"):
        join_groups(0, tensor=2, **options)
    assert join_groups(0, **options).tp.size == 1


@pytest.mark.slow
@pytest.mark.parametrize("layouts", [[{"tensor": 2}], [{"tensor": 4}, {"tensor": 2, "data": 2, "expert": 4}]])
def test_processes_over_gloo_give_the_logits_of_one(tiny_model, tmp_path, layouts):
    paths = [tiny_model(name, **SHAPE).path for name in NAMES]
    whole = [logits_of(load(path), TOKENS) for path in paths]
    size = layouts[0]["tensor"]
    multiprocessing.spawn(rank_process, (tmp_path, paths, TOKENS, *layouts), nprocs=size)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(size)]
    for number, layout in enumerate(layouts):
        groups = grid(**{"pipeline": 1, "data": 1, "expert": 1} | layout)
        for rank in range(size):
            exchanged, logits = found[rank][number]
            for name, ranks in groups.items():
                [members] = [each for each in ranks if rank in each]
                total = float(sum(members))
                assert exchanged[name] == {
                    "sum": [total], "all": list(map(float, members)), "last's": [float(members[-1])],
                    "mine of the sum": [total + members.index(rank) * len(members)],
                }  # fmt: skip
            for ours, expected, first in zip(logits, whole, found[0][number][1], strict=True):
                assert torch.equal(ours, first)
                assert_near(ours, expected)
