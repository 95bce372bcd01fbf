"""What a head drafts behind a check, before it is asked: the same drafts, and answers as without, whatever comes between."""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from safetensors.torch import load_file

from sapwood_testing.drafts.answers import Answers, assert_alike, compiled, run, tokens_of
from sapwood_testing.drafts.drafted import options, scheduler_of
from sapwood_testing.drafts.eagle_head import PlainHead
from sapwood_testing.drafts.fitted_head import GREEDY, PROMPTS, greedy_ones
from sapwood_testing.worker.eager_graphs import with_graphs
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.scheduler import Scheduler
from sapwood_worker.model.grammar.llguidance import GrammarStore
from sapwood_worker.model.runner.builder import build_headed_runner, build_runner
from sapwood_worker.model.runner.drafting_runner import DraftingRunner
from sapwood_worker.records.step import Runner

REGEX = compiled("regex", "[a-c]{4,9}=[0-9]{3}(xyz|zyx)")
ODD: list[dict[str, Any]] = [
    {"stop_token_ids": (1, 78)}, {"speculate": False}, {"logprobs": 2}, {"min_p": 0.1, "temperature": 0.8, "seed": 3},
    {"logit_bias": {62: -4.0, 1: 2.0}}, {"repetition_penalty": 1.2}, {"bad_words_ids": ((62, 62, 62), (1, 1))},
    {"min_tokens": 9, "ignore_eos": False}, {"allowed_token_ids": tuple(range(10, 90))}, {"max_tokens": 1},
]  # fmt: skip


@pytest.mark.parametrize(("page_size", "num_pages", "most"), [(1, 2048, 6), (16, 128, 6), (16, 128, 1), (4, 22, 4)])
@pytest.mark.parametrize("count", [1, 3])
def test_what_a_head_drafts_behind_a_check_is_what_it_says_when_it_is_asked(
    tiny_model: Any, trained: Path, page_size: int, num_pages: int, most: int, count: int
) -> None:
    """Drafts become longer and shorter, so that some of those that were begun are cut and some continue."""
    tiny = tiny_model("llama")
    plain = build_runner(options(tiny.path))
    runner = build_headed_runner(options(tiny.path, page_size=page_size, num_pages=num_pages), trained)
    draft, head = runner.draft, PlainHead(load_file(trained / "model.safetensors"), tiny.oracle)
    assert isinstance(draft, DraftingRunner)
    for each in (runner, draft):
        with_graphs(each, [1, 2, 4, 8, 32])
    scheduler = scheduler_of(runner, "eagle")
    speculation: Any = scheduler._speculation
    drafter, checked, lengths = speculation._drafter, 0, set()
    speculation._trials.rate = 0.9
    fill, settle = drafter.fill, drafter.settle

    def cut(decodes: Any, wanted: Any) -> Any:
        longest = 2 + scheduler._steps // 3 % most
        lengths.add(longest)
        return fill(decodes, [each[:longest] for each in wanted])

    def settled() -> float:
        nonlocal checked
        seconds: float = settle()
        for part in drafter._late_parts:
            checked += len(part.draft)
            # With few pages some checks have no graph, and no head behind them.
            assert num_pages == 22 or part.draft == head.draft(part.request.token_ids.tolist(), len(part.draft))
        return seconds

    drafter.fill, drafter.settle = cut, settled
    found = run(scheduler, runner, True, greedy_ones()[:count])
    assert_alike(found, run(scheduler_of(plain), plain, False, greedy_ones()[:count]))
    assert draft.ahead > 4 and checked > 15 and len(lengths) == most
    assert (scheduler.num_retractions > 0) == (num_pages == 22 and count == 3)


def odd_requests(seed: int, store: GrammarStore) -> tuple[list[Request], dict[int, int]]:
    """Greedy requests, most of them plain, others with something else, one with a grammar, and two that are embedded; and after
    how many tokens some are aborted."""
    chance, found = random.Random(seed), []
    for serial in range(8):
        change = chance.choice(ODD) if chance.random() < 0.4 else {}
        found.append(Request(serial, f"o{serial}", PROMPTS[serial], replace(GREEDY, **change)))
    masked = replace(GREEDY, ignore_eos=False)
    found.append(Request(8, "masked", PROMPTS[2], masked, grammar=store.build(REGEX)))
    found += [Request(9 + at, f"embedded{at}", [5 + at] * 30, GREEDY, pooling="mean") for at in range(2)]
    chance.shuffle(found)
    return found, {serial: chance.randrange(1, 20) for serial in chance.sample(range(8), 2)}


def run_odd(scheduler: Scheduler, runner: Runner, seed: int, store: GrammarStore) -> tuple[Answers, set[int]]:
    """The answers to requests that come one after another, as the overlapped loop runs them, and which were to be aborted."""
    asked, aborted = odd_requests(seed, store)
    coming, steps = deque(asked), 0
    answers: Answers = {request.serial: [] for request in asked}
    launched: deque[Any] = deque()

    def take(keep: int) -> None:
        while len(launched) > keep:
            for output in scheduler.update(launched.popleft().result()):
                answers[output.serial].append(output)
                if 0 < aborted.get(output.serial, 0) <= len(tokens_of(answers[output.serial])):
                    scheduler.abort(output.serial)

    while coming or scheduler.has_work:
        if coming and (steps % 5 == 0 or not scheduler.has_work):
            scheduler.add(coming.popleft())
        steps += 1
        if not scheduler.plans_ahead:
            take(0)
        planned = scheduler.schedule()
        if planned:
            launched.append(runner.launch(planned))
        take(int(bool(planned)))
        scheduler.check()
    return answers, set(aborted)


@pytest.mark.slow
@pytest.mark.parametrize(("page_size", "num_pages"), [(1, 400), (16, 128), (4, 30)])
def test_odd_requests_that_come_and_go_get_what_they_get_without_drafts(
    tiny_model: Any, trained: Path, store: GrammarStore, page_size: int, num_pages: int
) -> None:
    path = tiny_model("llama").path
    plain = build_runner(options(path))
    runner = build_headed_runner(options(path, page_size=page_size, num_pages=num_pages, max_running=4), trained)
    draft = runner.draft
    assert isinstance(draft, DraftingRunner)
    for each in (runner, draft):
        with_graphs(each, [1, 2, 4, 8, 32])
    scheduler: Any = scheduler_of(runner, "eagle")
    for seed in range(5):
        scheduler._speculation._trials.rate = 0.9
        found, aborted = run_odd(scheduler, runner, seed, store)
        expected, _ = run_odd(scheduler_of(plain), plain, seed, store)
        for serial in aborted:
            mine, theirs = tokens_of(found.pop(serial)), tokens_of(expected.pop(serial))
            common = min(len(mine), len(theirs))
            assert mine[:common] == theirs[:common]
        assert_alike(found, expected)
        scheduler.flush_cache()
    assert draft.ahead > 10 and scheduler.load().accepted_tokens > 30
