"""Scheduler and real runner together: texts that begin with a copied page are those of a scheduler without a cache."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest

from sapwood_common.contract.sampling import SamplingParams
from sapwood_testing.worker.model_scheduler import scheduler_for
from sapwood_testing.worker.ranks.group_of_threads import run_group
from sapwood_testing.worker.split_models import SHAPE
from sapwood_worker.core.scheduler.request import Request


class Texts:
    """Asks prompts that part within a page, one round after another, and next turns of them.

    Attributes:
        part_tokens: Tokens that were found in pages which are not equal to the end.
    """

    def __init__(self, **settings: Any) -> None:
        self._settings = settings
        self.part_tokens = 0

    def __call__(self, runner: Any) -> list[list[int]]:
        chance = random.Random(7)
        scheduler = scheduler_for(runner.info, max_step_tokens=64, **self._settings)
        shared = [chance.randrange(3, 97) for _ in range(44)]
        texts = [[*shared[:cut], chance.randrange(3, 97), chance.randrange(3, 97)] for cut in (44, 43, 39, 27, 5, 44)]
        received: dict[int, list[int]] = {}
        rounds = [[0], [1, 2], [3, 4, 5], [6, 7, 8]]
        for serials in rounds:
            for serial in serials:
                if serial >= 6:
                    texts.append([*texts[serial - 6], *received[serial - 6], chance.randrange(3, 97)])
                sampling = SamplingParams(temperature=0.8, seed=serial, max_tokens=9, ignore_eos=True)
                scheduler.add(Request(serial, f"r{serial}", array("I", texts[serial]), sampling))
            while scheduler.has_work:
                for output in scheduler.update(runner.execute(scheduler.schedule())):
                    received.setdefault(output.serial, []).extend(output.token_ids)
                scheduler.check()
        self.part_tokens = scheduler.load().part_page_tokens
        return [received[serial] for serial in range(len(texts))]


@pytest.mark.parametrize("kv_cache", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek-v2", "mistral-window"])
def test_texts_over_copied_pages_equal_recomputation(
    tiny_model: Any, make_runner: Any, name: str, kv_cache: str
) -> None:
    runner = make_runner(tiny_model(name).path, page_size=16, num_pages=40, kv_cache_dtype=kv_cache)
    hits, misses = Texts(), Texts(prefix_cache=False)
    assert hits(runner) == misses(runner)
    assert hits.part_tokens > 50 and misses.part_tokens == 0


@pytest.mark.parametrize(("size", "stages"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("name", ["llama", "gemma3", pytest.param("deepseek-v3", marks=pytest.mark.slow)])
def test_every_rank_copies_its_part_of_the_pages(
    tiny_model: Any, make_runner: Any, name: str, size: int, stages: int
) -> None:
    path = tiny_model(name, **SHAPE).path
    options = {"num_pages": 40, "max_running": 9, "page_size": 16}
    misses, hits = Texts(prefix_cache=False), Texts()
    alone = misses(make_runner(path, **options))
    assert run_group(size, path, hits, stages=stages, **options) == alone
    assert hits.part_tokens > 50
