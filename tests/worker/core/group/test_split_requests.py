"""Planner, leader and followers together where each rank has requests of its own: the answers are those of one process."""

from __future__ import annotations

import random
import threading
from array import array
from collections import Counter, deque
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from sapwood_common.contract.sampling import SamplingParams
from sapwood_testing.worker.eager_graphs import with_graphs
from sapwood_testing.worker.ranks.all_asked import ASKED, VOCAB, Answer, build_grammar
from sapwood_testing.worker.ranks.group_of_threads import run_group
from sapwood_testing.worker.split_models import SHAPE
from sapwood_testing.worker.thread_ranks import ThreadGroup
from sapwood_worker.config import WorkerConfig
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler_process import build_scheduler, build_tiers
from sapwood_worker.model.distributed import data_parallel
from sapwood_worker.model.grammar.backend import TokenMasks
from sapwood_worker.model.runner.model_runner import ModelRunner
from sapwood_worker.records.step import LaunchedStep, RankLostError
from sapwood_worker.settings import DispatchName

OPTIONS: dict[str, Any] = {"num_pages": 40, "max_running": 9, "page_size": 16}


class Asking:
    """Asks everything that can be asked, three times, with a retraction of all in the middle.

    Args:
        most: Tokens of an answer at most.
        **flags: The worker's.

    Attributes:
        steps: How many steps so many of the ranks have computed something in.
        requests: How many requests each rank got; empty: there is one rank.
        retractions: How often a request was sent back for want of pages.
        exchanged: Bytes that ranks gave each other for experts, of those that it takes where all rows go to all ranks.
    """

    def __init__(self, most: int = 16, **flags: Any) -> None:
        self._most = most
        self._flags = {"max_running": 9, "max_step_tokens": 64, "step_ms": 0, **flags}
        self.steps: Counter[int] = Counter()
        self.requests: list[int] = []
        self.retractions, self.exchanged = 0, 1.0

    def __call__(self, runner: Any) -> list[Answer]:
        scheduler: Any = build_scheduler(WorkerConfig(**self._flags), runner.info, masks=partial(TokenMasks, VOCAB))
        chance = random.Random(5)
        count = 3 * len(ASKED)
        for serial in range(count):
            asked = dict(ASKED[serial % len(ASKED)])
            grammar = build_grammar(asked.pop("grammar")) if "grammar" in asked else None
            prompt = [chance.randrange(3, VOCAB) for _ in range(chance.randrange(2, 40))]
            params = SamplingParams(**{"seed": serial, "max_tokens": self._most, **asked})
            scheduler.add(Request(serial, f"r{serial}", array("I", prompt), params, grammar=grammar))
        # The longest, so that in the end its rank computes alone.
        alone = SamplingParams(seed=count, max_tokens=2 * self._most, ignore_eos=True)
        scheduler.add(Request(count, f"r{count}", array("I", [5, 7]), alone))
        for serial, pooling in enumerate(("mean", "last"), count + 1):
            prompt = [chance.randrange(3, VOCAB) for _ in range(70)]
            scheduler.add(Request(serial, f"r{serial}", array("I", prompt), SamplingParams(), pooling=pooling))
        found = [Answer() for _ in range(count + 3)]
        launched: deque[LaunchedStep] = deque()
        steps = 0
        while scheduler.has_work:
            planned = scheduler.schedule()
            if planned:
                self.steps[sum(len(part.rows) > 0 for part in planned.parts or (planned,))] += 1
                launched.append(runner.launch(planned))
            while launched:
                for output in scheduler.update(launched.popleft().result()):
                    found[output.serial].take(output)
            steps += 1
            if steps == 9:
                scheduler.pause(retract=True)
                scheduler.resume()
            scheduler.check()
        if runner.experts is not None:
            tokens = sum(map(sum, runner.experts()()))
            self.exchanged = runner.exchanged_bytes(tokens) / (tokens * runner.info.expert_exchange or 1)
        load = scheduler.load()
        self.requests = [each.requests for each in load.ranks]
        assert load.num_pages == runner.info.attention_ranks * runner.info.num_pages
        parts = scheduler._ranks if load.ranks else [scheduler]
        self.retractions = sum(each.num_retractions for each in parts)
        return found


@pytest.mark.parametrize(
    ("size", "name", "whole_experts", "dispatch"),
    [
        (2, "deepseek-v3", True, "gather"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [
                *((2, "llama", False, "gather"), (2, "gemma3", False, "gather"), (4, "qwen3-moe", True, "gather")),
                *((4, "deepseek-v3", False, "gather"), (2, "gpt-oss", True, "gather")),
                *((3, "llama-biased-tied", False, "gather"), (2, "deepseek-v3", True, "direct")),
                *((4, "qwen3-moe", True, "direct"), (2, "gpt-oss", True, "direct"), (2, "llama4", True, "direct")),
            ]
        ),
    ],
)
def test_ranks_with_requests_of_their_own_answer_as_one_process_does(
    tiny_model: Any, make_runner: Any, size: int, name: str, whole_experts: bool, dispatch: DispatchName
) -> None:
    path = tiny_model(name, **SHAPE).path
    one, group = Asking(), Asking()
    alone = one(make_runner(path, **OPTIONS))
    split: dict[str, Any] = {"own_requests": True, "whole_experts": whole_experts, "dispatch": dispatch}
    theirs = run_group(size, path, group, **split, **OPTIONS)
    for mine, other in zip(theirs, alone, strict=True):
        mine.assert_is(other)
    assert 0 < group.exchanged < 1 if dispatch == "direct" else group.exchanged in (0, pytest.approx(1))
    assert len(group.requests) == size and min(group.requests) > 0, "every rank has had some"
    assert group.steps[size] > 0, "all had something to compute at once"
    assert sum(group.steps[each] for each in range(1, size)) > 0, "some were idle while others computed"


@pytest.mark.slow
@pytest.mark.parametrize(("size", "name"), [(2, "llama"), (4, "deepseek-v3")])
def test_answers_are_the_same_where_ranks_send_rows_one_by_one(
    tiny_model: Any, make_runner: Any, monkeypatch: pytest.MonkeyPatch, size: int, name: str
) -> None:
    monkeypatch.setattr(data_parallel, "_LEAST_SAVED", 0)  # as many as for long prompts of large models
    path = tiny_model(name, **SHAPE).path
    sent: list[int] = []
    reduce = ThreadGroup.reduce
    monkeypatch.setattr(ThreadGroup, "reduce", lambda self, x, target: sent.append(len(x)) or reduce(self, x, target))
    alone = Asking()(make_runner(path, **OPTIONS))
    for mine, other in zip(run_group(size, path, Asking(), own_requests=True, **OPTIONS), alone, strict=True):
        mine.assert_is(other)
    assert sent


@pytest.mark.parametrize("name", ["deepseek-v3", pytest.param("qwen3-moe", marks=pytest.mark.slow)])
def test_ranks_replay_graphs_of_one_size_and_answer_as_one_process_does(
    tiny_model: Any, make_runner: Any, name: str
) -> None:
    """Without a GPU: replays compute what would have been captured, where every rank has as many rows."""
    path, lock = tiny_model(name, **SHAPE).path, threading.Lock()
    sizes: dict[ModelRunner, list[int]] = {}
    padded: dict[ModelRunner, list[tuple[int, list[int]]]] = {}

    def prepare(runner: ModelRunner) -> None:
        with lock:  # it patches torch for as long as it takes
            graphs = with_graphs(runner, (1, 2, 4, 9))
        replayed, told = sizes[runner], padded[runner] = [], []
        runner.ops.padded = lambda *counts: told.append(counts) or nullcontext()
        for size, captured in graphs._captured.items():
            captured.graph._compute = partial(as_captured, runner, captured.graph._compute, size, replayed)

    def as_captured(runner: ModelRunner, compute: Any, size: int, replayed: list[int]) -> Any:
        rows = runner._own_rows
        assert rows is not None
        replayed.append(size)
        told = rows._counts
        rows.forget()
        try:
            return compute()
        finally:
            rows._counts = told

    steps = {"max_step_tokens": 256}  # prompts whose tokens are scored get through soon: many decode at once then
    one, group = Asking(**steps), Asking(**steps)
    alone = one(make_runner(path, **OPTIONS))
    theirs = run_group(2, path, group, own_requests=True, whole_experts=True, prepare=prepare, **OPTIONS)
    for mine, other in zip(theirs, alone, strict=True):
        mine.assert_is(other)
    first, second = sizes.values()
    assert first == second and len({*first}) > 1
    assert group.steps[1] > 0, "a rank was idle while the other replayed"
    for runner, told in padded.items():
        assert runner._own_rows is not None
        rank = runner._own_rows._group.rank
        assert all(own == of_ranks[rank] for own, of_ranks in told), "what pads a rank's rows is known"
    one_told, other_told = ([of_ranks for _, of_ranks in told] for told in padded.values())
    assert one_told == other_told and any(0 in each for each in one_told), "by all ranks, of idle ones too"


@pytest.mark.slow
def test_requests_go_back_for_want_of_pages_and_end_all_the_same(tiny_model: Any, make_runner: Any) -> None:
    path = tiny_model("deepseek-v3", **SHAPE).path
    options = OPTIONS | {"num_pages": 10}
    one, group = Asking(60, conservativeness=0.0), Asking(60, conservativeness=0.0)
    alone = one(make_runner(path, **options))
    theirs = run_group(2, path, group, own_requests=True, whole_experts=True, **options)
    for mine, other in zip(theirs, alone, strict=True):
        mine.assert_is(other)
    assert group.retractions > 0


class Tiered:
    """Asks about a few documents in turns: together far more than the first tier of a rank holds.

    Attributes:
        hits: Tokens from the second tier.
    """

    def __init__(self, **flags: Any) -> None:
        self._flags, self.hits = flags, 0

    def __call__(self, runner: Any) -> list[list[int]]:
        config = WorkerConfig(max_running=3, max_step_tokens=24, **self._flags)
        tiering = build_tiers(config, runner)
        assert tiering is not None
        scheduler: Any = build_scheduler(config, runner.info, tiering.caches)
        chance = random.Random(5)
        documents = [[chance.randrange(3, VOCAB) for _ in range(70)] for _ in range(6)]
        received: dict[int, list[int]] = {}
        for serial in range(24):
            prompt = documents[serial % 6] + [chance.randrange(3, VOCAB) for _ in range(3)]
            params = SamplingParams(temperature=0.7, seed=serial, max_tokens=6, ignore_eos=True)
            scheduler.add(Request(serial, f"r{serial}", array("I", prompt), params))
            if serial % 3 == 2:
                while scheduler.has_work or scheduler.has_copies:
                    planned = scheduler.schedule()
                    if planned:
                        for output in scheduler.update(runner.execute(planned)):
                            received.setdefault(output.serial, []).extend(output.token_ids)
                    scheduler.check()
        self.hits = scheduler.load().host_hit_tokens
        return [received[serial] for serial in range(24)]


@pytest.mark.parametrize("name", ["deepseek-v3", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_each_rank_has_a_second_tier_of_its_own(tiny_model: Any, make_runner: Any, name: str) -> None:
    path = tiny_model(name, **SHAPE).path
    options: dict[str, Any] = {"num_pages": 14, "max_running": 3, "page_size": 16, "host_cache_ratio": 4.0}
    one, group = Tiered(host_cache_ratio=4.0), Tiered(host_cache_ratio=4.0)
    alone = one(make_runner(path, **options))
    assert run_group(2, path, group, own_requests=True, **options) == alone
    assert group.hits > 0


@pytest.mark.parametrize(("size", "odd"), [(2, 1), (3, 0), pytest.param(3, 2, marks=pytest.mark.slow)])
def test_a_rank_that_gets_other_rows_than_the_others_is_named(
    tiny_model: Any, monkeypatch: Any, size: int, odd: int
) -> None:
    gather, calls = ThreadGroup.gather_rows, Counter()

    def one_bit(self: ThreadGroup, x: Tensor) -> Tensor:
        rows = gather(self, x)
        calls[self.rank] += 1
        if self.rank == odd and calls[odd] == 5:
            rows.view(torch.int32)[:, 7] ^= 1
        return rows

    monkeypatch.setattr(ThreadGroup, "gather_rows", one_bit)
    with pytest.raises(RankLostError, match=f"rank {odd} diverged: in step 1 it got other rows than the others"):
        run_group(size, tiny_model("llama-biased-tied", **SHAPE).path, Asking(), own_requests=True, **OPTIONS)


def test_a_rank_that_fails_alone_ends_the_group(tiny_model: Any, leader_failing: Any) -> None:
    path = tiny_model("llama", **SHAPE).path
    with pytest.raises(RankLostError, match="rank 0 failed alone: no room here"):
        run_group(2, path, leader_failing(Asking()), own_requests=True, **OPTIONS)
