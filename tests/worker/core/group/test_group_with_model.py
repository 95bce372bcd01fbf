"""Scheduler, leader and followers together over split models: whatever is asked, the answers are those of one process."""

from __future__ import annotations

import random
from array import array
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sapwood_common.contract.sampling import SamplingParams
from sapwood_testing.worker.model_scheduler import scheduler_for
from sapwood_testing.worker.ranks.all_asked import ASKED, VOCAB
from sapwood_testing.worker.ranks.asked_at_once import answers
from sapwood_testing.worker.ranks.group_of_threads import run_group
from sapwood_testing.worker.split_models import SHAPE
from sapwood_worker.config import WorkerConfig
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.tiering import Tiering
from sapwood_worker.model.distributed.pipeline import MicroBatches
from sapwood_worker.model.runner import builder
from sapwood_worker.records.step import LaunchedStep, RankLostError, Step


@pytest.mark.parametrize(
    ("size", "stages", "name"),
    [
        *((2, 1, "llama"), (2, 1, "gemma3"), (2, 1, "deepseek-v3"), (4, 1, "llama-biased-tied")),
        *((1, 2, "gemma3"), (2, 2, "llama-biased-tied"), (1, 2, "deepseek-v3"), (1, 3, "llama")),
    ],
)
def test_a_group_answers_as_one_process_does(
    tiny_model: Any, make_runner: Any, monkeypatch: Any, size: int, stages: int, name: str
) -> None:
    # Tiny models compute too fast for steps to be cut.
    monkeypatch.setattr(builder, "measured", lambda parallel, *_: MicroBatches(parallel.pp.size, 1e-9, 1.0))
    path = tiny_model(name, **SHAPE).path
    options = {"num_pages": 40, "max_running": 9, "page_size": 16}
    alone = answers(make_runner(path, **options))
    group = run_group(size, path, answers, stages=stages, **options)
    for mine, theirs in zip(group, alone, strict=True):
        mine.assert_is(theirs)
    assert all(answer.tokens for answer in alone[: len(ASKED)])
    assert len(alone[2].logprobs) == 16
    assert alone[-1].embedding


def prompts() -> list[list[int]]:
    """Three documents, each asked about twice, in turns: together far more than the first tier holds."""
    chance = random.Random(5)
    documents = [[chance.randrange(3, VOCAB) for _ in range(70)] for _ in range(3)]
    return [document + [chance.randrange(3, VOCAB) for _ in range(3)] for _ in range(2) for document in documents]


class Tiered:
    """Asks the prompts one after another, with the tiers that the flags ask for.

    Attributes:
        fetched, hits: Pages from the store and from the second tier.
        micro_batches: Most steps that were in flight at once.
    """

    def __init__(self, *, at_once: int = 1, **flags: Any) -> None:
        self._flags, self._at_once = flags, at_once
        self.fetched = self.hits = self.micro_batches = 0

    def __call__(self, runner: Any) -> list[list[int]]:
        config = WorkerConfig(max_running=3, max_step_tokens=24, storage_prefetch="wait_complete", **self._flags)
        tiering = Tiering(config, runner, runner.host_pool, 0.001)
        scheduler = scheduler_for(runner.info, tiering.cache, max_running=3, max_step_tokens=24)
        received: dict[int, list[int]] = {}
        launched: deque[LaunchedStep] = deque()
        for serial, prompt in enumerate(prompts()):
            params = SamplingParams(temperature=0.7, seed=serial, max_tokens=6, ignore_eos=True)
            scheduler.add(Request(serial, f"r{serial}", array("I", prompt), params))
            if (serial + 1) % self._at_once:
                continue
            while scheduler.has_work or scheduler.has_copies or launched:
                planned = scheduler.schedule()
                if planned:
                    launched.append(runner.launch(planned))
                    self.micro_batches = max(self.micro_batches, len(launched))
                elif not launched:
                    scheduler.wait_for_storage(0.01)
                while len(launched) > (scheduler.micro_batches - 1 if planned else max(0, len(launched) - 1)):
                    for output in scheduler.update(launched.popleft().result()):
                        received.setdefault(output.serial, []).extend(output.token_ids)
        while tiering.cache.storage.writing:
            scheduler.wait_for_storage(0.01)
        self.hits = tiering.cache.counters.host_hits
        self.fetched = tiering.cache.storage.counters.fetched
        tiering.opener.close()
        return [received[serial] for serial in range(len(prompts()))]


@pytest.mark.parametrize("name", ["llama", "gemma3", pytest.param("deepseek-v3", marks=pytest.mark.slow)])
def test_each_rank_moves_its_part_through_the_tiers(
    tiny_model: Any, make_runner: Any, tmp_path: Path, name: str
) -> None:
    path = tiny_model(name, **SHAPE).path
    options: dict[str, Any] = {"num_pages": 7, "max_running": 3, "page_size": 16, "host_cache_ratio": 4.0}
    store = {"host_cache_ratio": 4.0, "storage": f"file://{tmp_path}/store?size_gb=1", "storage_min_tokens": 16}
    alone = Tiered(host_cache_ratio=4.0)(make_runner(path, **options))
    warm, cold, other, one = (Tiered(**store) for _ in range(4))
    assert run_group(2, path, warm, **options) == alone
    assert warm.hits > 0
    assert run_group(2, path, cold, **options) == alone
    assert cold.fetched > warm.fetched
    # What a group has stored is read by those of other sizes, and by one process.
    size, stages = (4, 1) if name == "llama" else (1, 2)
    assert run_group(size, path, other, stages=stages, **options) == alone
    assert other.hits > 0
    assert one(make_runner(path, **options)) == alone
    assert cold.fetched == other.fetched == one.fetched


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_pages_go_through_the_tiers_while_each_stage_computes_other_requests(
    tiny_model: Any, make_runner: Any, tmp_path: Path, size: int
) -> None:
    path = tiny_model("llama", **SHAPE).path
    options: dict[str, Any] = {"num_pages": 12, "max_running": 3, "page_size": 16, "host_cache_ratio": 4.0}
    store = {"host_cache_ratio": 4.0, "storage": f"file://{tmp_path}/store?size_gb=1", "storage_min_tokens": 16}
    alone = Tiered(host_cache_ratio=4.0)(make_runner(path, **options))
    warm, cold = Tiered(at_once=3, **store), Tiered(at_once=3, **store)
    assert run_group(size, path, warm, stages=2, **options) == alone
    assert (warm.micro_batches, warm.hits > 0) == (2, True)
    assert run_group(size, path, cold, stages=2, **options) == alone
    assert (cold.micro_batches, cold.fetched > warm.fetched) == (2, True)


@pytest.mark.parametrize("name", ["llama", pytest.param("deepseek-v3", marks=pytest.mark.slow)])
def test_a_group_reads_what_one_process_has_stored(
    tiny_model: Any, make_runner: Any, tmp_path: Path, name: str
) -> None:
    path = tiny_model(name, **SHAPE).path
    options: dict[str, Any] = {"num_pages": 7, "max_running": 3, "page_size": 16, "host_cache_ratio": 4.0}
    store = {"host_cache_ratio": 4.0, "storage": f"file://{tmp_path}/store?size_gb=1", "storage_min_tokens": 16}
    one, again, group = (Tiered(**store) for _ in range(3))
    alone = one(make_runner(path, **options))
    assert again(make_runner(path, **options)) == alone
    assert run_group(2, path, group, stages=2, **options) == alone
    assert group.fetched == again.fetched > one.fetched


@pytest.mark.parametrize(("name", "share"), [("deepseek-v3", 1), ("llama", 2)])
def test_what_all_ranks_keep_alike_is_once_in_the_second_tier(tiny_model: Any, name: str, share: int) -> None:
    """Of a Llama with two key heads each of four ranks has one, so that a record has each head twice."""
    path = tiny_model(name, **SHAPE).path
    options: dict[str, Any] = {"num_pages": 7, "max_running": 3, "page_size": 16, "host_cache_ratio": 4.0}
    sizes = [run_group(size, path, lambda runner: runner.host_pool.page_bytes, **options) for size in (2, 4)]
    assert sizes[1] == share * sizes[0]


def wrong() -> Step:
    """A step that no runner can compute: there is no such row of the page table."""
    one, pages = np.ones(1, np.int64), np.zeros((1, 1), np.int32)
    return Step(7, 1000 * one, 0 * one, one, one, 5 * one, pages)


def test_a_step_that_fails_on_all_ranks_alike_ends_only_that_step(tiny_model: Any) -> None:
    def work(runner: Any) -> list[Any]:
        with pytest.raises(IndexError):
            runner.execute(wrong())
        return answers(runner)

    assert run_group(2, tiny_model("llama", **SHAPE).path, work, num_pages=40, max_running=9)[0].tokens


def test_a_step_that_fails_on_one_rank_alone_ends_the_group(tiny_model: Any, leader_failing: Any) -> None:
    path = tiny_model("llama", **SHAPE).path
    with pytest.raises(RankLostError, match="rank 0 failed alone: no room here"):
        run_group(2, path, leader_failing(answers), num_pages=40, max_running=9)
