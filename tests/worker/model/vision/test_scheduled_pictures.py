"""Pictures through scheduler and cache: greedy tokens are transformers', whatever is cached, retracted, moved or split."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sapwood_common.contract.sampling import SamplingParams
from sapwood_testing.models.vision_models import make_vision
from sapwood_testing.models.vision_prompts import Prompts, picture
from sapwood_testing.worker.model_scheduler import scheduler_for
from sapwood_testing.worker.ranks.group_of_threads import run_group
from sapwood_worker.core.cache.hierarchical import HierarchicalCache
from sapwood_worker.core.cache.host import HostPages
from sapwood_worker.core.cache.storage.file import FileStorage
from sapwood_worker.core.cache.storage.opener import StorageFacts, open_connection
from sapwood_worker.core.cache.storage.tier import PrefetchOptions, StorageTier
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.scheduler import Scheduler
from sapwood_worker.records.pictures import Picture

COUNT = 6
Made = tuple[list[int], list[Any], list[Image.Image]]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Prompts:
    return Prompts(make_vision("qwen2_5_vl", tmp_path_factory.mktemp("qwen")))


def prompt(qwen: Prompts, *parts: str | int) -> Made:
    """A prompt of texts and of pictures by their seeds; all pictures have one size."""
    images = [picture(part, (140, 84)) for part in parts if isinstance(part, int)]
    left = iter(images)
    tokens, pictures = qwen.make(*(part if isinstance(part, str) else next(left) for part in parts))
    return tokens, pictures, images


class Asked:
    """Requests in a scheduler, and their answers."""

    def __init__(self, scheduler: Scheduler, runner: Any) -> None:
        self.scheduler, self.runner = scheduler, runner
        self.requests: dict[int, Request] = {}
        self.cached: dict[int, int] = {}

    def add(self, made: Made, count: int = COUNT, output_tokens: int = 0) -> Request:
        tokens, pictures, _ = made
        serial = len(self.requests) + 1
        sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        request = Request(serial, str(serial), tokens, sampling, output_tokens=output_tokens, pictures=tuple(pictures))
        self.requests[serial] = request
        self.scheduler.add(request)
        return request

    def step(self) -> None:
        planned = self.scheduler.schedule()
        if planned:
            for output in self.scheduler.update(self.runner.execute(planned)):
                if output.finish_reason:
                    self.cached[output.serial] = output.cached_tokens
        else:
            self.scheduler.wait_for_storage(0.01)

    def finish(self) -> None:
        while self.scheduler.has_work:
            self.step()

    def tokens(self, request: Request) -> list[int]:
        return request.token_ids[request.prompt_length :].tolist()


def check(qwen: Prompts, asked: Asked, pairs: Sequence[tuple[Request, Made]]) -> None:
    asked.finish()
    for request, (tokens, _, images) in pairs:
        assert asked.tokens(request) == qwen.tiny.greedy(tokens, images, request.generated)


def runner_of(qwen: Prompts, make_runner: Any, **options: Any) -> Any:
    return make_runner(qwen.tiny.path, **{"page_size": 4, "num_pages": 256, "max_running": 4, **options})


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_equal_tokens_of_other_pictures_share_pages_up_to_the_picture_and_no_further(
    qwen: Prompts, make_runner: Any, page_size: int
) -> None:
    runner = runner_of(qwen, make_runner, page_size=page_size, num_pages=1024 // page_size)
    asked = Asked(scheduler_for(runner.info), runner)
    first, same, other = (prompt(qwen, "what a text before it ", seed, " end") for seed in (0, 0, 1))
    assert first[0] == other[0]
    pairs = []
    for made in (first, same, other):
        pairs.append((asked.add(made), made))
        asked.finish()
    check(qwen, asked, pairs)
    before = first[1][0].offset
    assert asked.cached[1] == 0
    assert asked.cached[2] >= (len(first[0]) - 1) // page_size * page_size - page_size
    assert asked.cached[3] == before
    assert runner.pictures.encoded == 2


@pytest.mark.parametrize("chunk", [7, 11, 16])
def test_a_prefix_that_ends_within_a_picture_goes_on_there(qwen: Prompts, make_runner: Any, chunk: int) -> None:
    runner = runner_of(qwen, make_runner)
    asked = Asked(scheduler_for(runner.info, max_step_tokens=chunk), runner)
    made = prompt(qwen, "text ", 3, " and ", 4, " end")
    offset, end = made[1][0].offset, made[1][0].end
    gone = asked.add(made)
    while gone.computed <= offset + 1:
        asked.step()
    at = gone.computed
    assert offset < at < end
    asked.scheduler.abort(gone.serial)
    later = asked.add(made)
    check(qwen, asked, [(later, made)])
    assert asked.cached[later.serial] == at


def test_retracted_requests_give_the_answers_of_others(qwen: Prompts, make_runner: Any) -> None:
    runner = runner_of(qwen, make_runner, num_pages=34, picture_cache_bytes=0)
    asked = Asked(scheduler_for(runner.info, conservativeness=0.0, prefix_cache=False), runner)
    prompts = [
        prompt(qwen, "one ", 0, " is"),
        prompt(qwen, "two ", 1, " and ", 2, " are"),
        prompt(qwen, "none is there"),
    ]
    pairs = [(asked.add(made, 24), made) for made in prompts]
    check(qwen, asked, pairs)
    assert sum(request.retractions for request, _ in pairs) > 0


def test_an_answer_goes_on_where_another_worker_left_off(qwen: Prompts, make_runner: Any) -> None:
    made = prompt(qwen, "a ", 5, " b ", 6, " c")
    tokens, pictures, images = made
    expected = qwen.tiny.greedy(tokens, images, 8)
    runner = runner_of(qwen, make_runner)
    asked = Asked(scheduler_for(runner.info), runner)
    resumed = asked.add(([*tokens, *expected[:3]], pictures, images), 5, output_tokens=3)
    asked.finish()
    assert asked.tokens(resumed) == expected[3:]


def test_pages_with_pictures_come_back_from_the_hosts_memory(qwen: Prompts, make_runner: Any) -> None:
    runner = runner_of(qwen, make_runner, num_pages=14, host_cache_ratio=8.0)
    tiers = HierarchicalCache(HostPages(runner.host_pool.num_pages), 14, 4)
    asked = Asked(scheduler_for(runner.info, tiers), runner)
    pairs = []
    for _ in range(2):
        for seed in (0, 1, 2):
            made = prompt(qwen, "text ", seed, " end")
            pairs.append((asked.add(made), made))
            asked.finish()
    check(qwen, asked, pairs)
    assert tiers.counters.host_hits >= 6
    assert runner.pictures.encoded == 3, "what is cached needs no encoding"


def test_a_worker_that_starts_cold_takes_pages_with_pictures_from_the_store(
    qwen: Prompts, make_runner: Any, tmp_path: Path
) -> None:
    for life, seeds in enumerate(((2, 0, 1), (1, 0, 2))):  # each life numbers pictures as they come
        runner = runner_of(qwen, make_runner, num_pages=48, host_cache_ratio=4.0)
        host = HostPages(runner.host_pool.num_pages)
        storage = StorageTier(
            host, runner.host_pool, 4, PrefetchOptions(policy="wait_complete", share=1.0), time.monotonic
        )
        facts = StorageFacts(runner.host_pool, 4, runner.cache_identity, 1.0, min_tokens=1)
        storage.attach(open_connection(FileStorage(tmp_path, 1 << 30), facts, time.monotonic))
        asked = Asked(scheduler_for(runner.info, HierarchicalCache(host, 48, 4, storage=storage)), runner)
        pairs = []
        for seed in seeds:
            made = prompt(qwen, "text ", seed, " end")
            pairs.append((asked.add(made), made))
            asked.finish()
        while asked.scheduler.has_copies:
            asked.step()
        check(qwen, asked, pairs)
        assert storage.counters.rejected == 0
        assert runner.pictures.encoded == (3 if life == 0 else 0)


def test_two_ranks_answer_as_one(qwen: Prompts) -> None:
    made = [prompt(qwen, "text ", 0, " and ", 1, " end"), prompt(qwen, "none"), prompt(qwen, 2, " end")]

    def work(runner: Any) -> list[list[int]]:
        asked = Asked(scheduler_for(runner.info, max_step_tokens=17), runner)
        requests = [asked.add(each) for each in made]
        asked.finish()
        return [asked.tokens(request) for request in requests]

    found = run_group(2, qwen.tiny.path, work, page_size=4, num_pages=256, max_running=4)
    assert found == [qwen.tiny.greedy(tokens, images, COUNT) for tokens, _, images in made]


def places_of(tokens: list[int], pictures: list[Picture]) -> list[Any]:
    """For each picture the places of the tokens that stand for it."""
    ids = np.array(tokens)
    return [each.offset + np.flatnonzero(ids[each.offset : each.end] == ids[each.offset]) for each in pictures]


def test_positions_of_random_layouts_are_those_of_transformers(qwen: Prompts, make_runner: Any) -> None:
    vision = runner_of(qwen, make_runner).pictures.vision
    draw = np.random.default_rng(5)
    for _ in range(40):
        parts: list[Any] = []
        for _ in range(int(draw.integers(1, 6))):
            parts.append("x" * int(draw.integers(1, 9)))
            parts.append(picture(int(draw.integers(99)), (int(draw.integers(30, 260)), int(draw.integers(30, 260)))))
        tokens, pictures = qwen.make(*parts, "end")
        inputs = qwen.tiny.inputs(tokens, [part for part in parts if not isinstance(part, str)])
        theirs, deltas = qwen.tiny.oracle.model.get_rope_index(
            inputs["input_ids"], inputs["mm_token_type_ids"], inputs["image_grid_thw"]
        )
        length = pictures[-1].end
        ours = vision.positions(length, pictures, places_of(tokens, pictures))
        assert np.array_equal(ours[:, :length], theirs[:, 0, :length].numpy())
        assert ours[:, length].tolist() == [length + int(deltas)] * 3


@pytest.mark.parametrize(("most", "begun"), [(1, 1), (30, 2), (1000, 4)])
def test_a_step_encodes_no_more_tokens_of_pictures_than_it_may_and_text_continues(
    qwen: Prompts, make_runner: Any, most: int, begun: int
) -> None:
    runner = runner_of(qwen, make_runner)
    asked = Asked(scheduler_for(runner.info, picture_tokens=most), runner)
    text = prompt(qwen, "only text")
    pairs = [(asked.add(text, 12), text)]
    asked.step()
    for parts in ((0,), (1, " and ", 2), (3,)):
        made = prompt(qwen, *parts, " end")
        assert made[1][0].length == 15
        pairs.append((asked.add(made), made))
    known, counts = len(pairs[0][0].token_ids), []
    while asked.scheduler.has_work and runner.pictures.encoded < 4:
        before = runner.pictures.encoded
        asked.step()
        counts.append(runner.pictures.encoded - before)
        assert len(pairs[0][0].token_ids) > known, "a picture delays no decode"
        known = len(pairs[0][0].token_ids)
    assert max(counts) == begun
    assert sum(counts) == 4
    check(qwen, asked, pairs)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Prompts:
    return Prompts(make_vision("gemma3", tmp_path_factory.mktemp("gemma")))


@pytest.mark.parametrize("budget", [3, 17, 40])
def test_a_picture_seen_whole_is_computed_in_one_step_of_any_size(
    gemma: Prompts, make_runner: Any, budget: int
) -> None:
    runner = runner_of(gemma, make_runner, num_pages=512)
    asked = Asked(scheduler_for(runner.info, max_step_tokens=budget), runner)
    prompts = [
        prompt(gemma, "text ", 0, " and ", 1, " end"), prompt(gemma, "none"), prompt(gemma, 2, " end"),
        prompt(gemma, "text ", 0, " and ", 2, " other end"),
    ]  # fmt: skip
    check(gemma, asked, [(asked.add(made), made) for made in prompts])


def test_a_prefix_that_ends_within_a_picture_that_is_seen_whole_is_used(gemma: Prompts, make_runner: Any) -> None:
    runner = runner_of(gemma, make_runner, num_pages=512)
    asked = Asked(scheduler_for(runner.info), runner)
    first, cut = prompt(gemma, "what is it ", 3, " end"), prompt(gemma, "what is it ", 3, " end")
    gone = asked.add(first)
    asked.finish()
    assert asked.tokens(gone) == gemma.tiny.greedy(first[0], first[2], COUNT)
    middle = first[1][0].offset + 6
    pages = asked.scheduler._cache._tree.evict(  # as if room had been needed
        asked.scheduler._cache._tree.num_pages - middle // 4
    )
    asked.scheduler._cache._drop(pages)
    later = asked.add(cut)
    check(gemma, asked, [(later, cut)])
    assert asked.cached[later.serial] == middle // 4 * 4
