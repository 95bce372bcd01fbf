"""Drafting changes no token: scheduler and real runner with drafts compared with the same without, whatever is asked for and
continues.

Most drafts here are the right answer, spoilt in places, so that all, some and none of a draft is accepted; the last tests are the
prefix drafter's own.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from sapwood_common.contract.sampling import SamplingParams
from sapwood_testing.drafts.answers import (
    VOCAB,
    Answers,
    assert_alike,
    assert_stopped,
    prompts,
    requests,
    run,
    stop_strings,
    tokens_of,
)
from sapwood_testing.drafts.scripted_drafter import ScriptedDrafter
from sapwood_testing.worker.model_scheduler import scheduler_for
from sapwood_testing.worker.ranks.group_of_threads import run_group
from sapwood_testing.worker.split_models import SHAPE
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.scheduler import Scheduler
from sapwood_worker.model.grammar.backend import TokenMasks
from sapwood_worker.model.grammar.llguidance import GrammarStore
from sapwood_worker.model.runner.model_runner import ModelRunner


@pytest.fixture(scope="module")
def make(make_runner: Any, tiny_model: Any) -> Callable[..., tuple[Scheduler, ModelRunner]]:
    """A scheduler and a runner; ``drafter`` and ``speculate`` say what is drafted, ``name`` which model."""

    def make_(name: str = "llama", drafter: Any = None, **settings: Any) -> tuple[Scheduler, ModelRunner]:
        settings = {"page_size": 16, "num_pages": 128, "max_running": 8} | settings
        sizes = {key: settings[key] for key in ("page_size", "num_pages", "max_running")}
        runner = make_runner(tiny_model(name).path, **sizes)
        settings = {"context_length": 512, "eos_token_ids": frozenset({0}), "conservativeness": 0.0} | settings
        return scheduler_for(runner.info, masks=TokenMasks(VOCAB), drafter=drafter, **settings), runner

    return make_


@pytest.fixture(scope="module")
def plain(make: Any, store: GrammarStore) -> Callable[[str], Answers]:
    """A model's answers without drafts."""
    known: dict[str, Answers] = {}

    def plain_(name: str) -> Answers:
        if name not in known:
            known[name] = run(*make(name), False, requests(store))
        return known[name]

    return plain_


def scripted(answers: Answers, right: float) -> ScriptedDrafter:
    return ScriptedDrafter(
        lambda request: iter(tokens_of(answers[request.serial])), random.Random(1), right, vocab_size=VOCAB
    )


@pytest.mark.parametrize(
    ("name", "page_size", "num_pages", "max_running", "overlap"),
    [
        pytest.param("llama", 16, 128, 1, False, marks=pytest.mark.slow),
        pytest.param("llama", 1, 2048, 4, False, marks=pytest.mark.slow),
        ("llama", 16, 128, 16, True),
        pytest.param("llama", 1, 2048, 32, True, marks=pytest.mark.slow),
        ("llama", 4, 30, 8, True),
        pytest.param("gemma3", 1, 200, 4, False, marks=pytest.mark.slow),
        ("gemma3", 1, 2048, 12, True),
    ],
)
def test_tokens_are_those_without_drafts(
    make: Any,
    plain: Callable[[str], Answers],
    store: GrammarStore,
    name: str,
    page_size: int,
    num_pages: int,
    max_running: int,
    overlap: bool,
) -> None:
    expected = plain(name)
    scheduler, runner = make(
        name,
        scripted(expected, 0.8),
        page_size=page_size,
        num_pages=num_pages,
        max_running=max_running,
        max_step_tokens=64,
        speculate="prefix",
    )
    stops = stop_strings(expected)
    found = run(scheduler, runner, overlap, requests(store), stops)
    assert_stopped(found, expected, stops)
    assert_alike(found, expected, stops)
    load = scheduler.load()
    assert load.drafted_tokens - load.accepted_tokens > 5
    assert load.accepted_tokens > 30
    if num_pages == 30:
        assert scheduler.num_retractions > 0


@pytest.mark.parametrize("right", [0.0, 1.0])
def test_drafts_all_wrong_or_all_right_change_the_number_of_steps_and_no_token(
    make: Any, plain: Callable[[str], Answers], store: GrammarStore, right: float
) -> None:
    expected = plain("llama")
    scheduler, runner = make(drafter=scripted(expected, right), speculate="prefix", max_running=8)
    found = run(scheduler, runner, True, requests(store))
    assert_alike(found, expected)
    load = scheduler.load()
    if right:
        assert load.accepted_tokens == load.drafted_tokens > 100
    for serial, outputs in found.items():
        # As many as were drafted for it, and no more than its output.
        assert 0 <= outputs[-1].accepted_tokens <= outputs[-1].completion_tokens, serial
    assert sum(outputs[-1].accepted_tokens for outputs in found.values()) == load.accepted_tokens
    assert sum(outputs[-1].drafted_tokens for outputs in found.values()) == load.drafted_tokens


def test_a_request_that_goes_on_elsewhere_is_drafted_for_and_stays_the_same(
    make: Any, plain: Callable[[str], Answers], store: GrammarStore
) -> None:
    expected = plain("llama")
    scheduler, runner = make(speculate="prefix", drafter=None)
    run(scheduler, runner, True, requests(store)[:9])  # its cache has the answers now
    for cut in (1, 8):
        for request in requests(store)[1:9:2]:
            done = tokens_of(expected[request.serial])[:cut]
            if expected[request.serial][-1].completion_tokens <= cut:
                continue
            sampling = replace(request.sampling, max_tokens=request.sampling.max_tokens - cut)
            again = Request(request.serial, "again", [*request.token_ids, *done], sampling, output_tokens=cut)
            found = run(scheduler, runner, True, [again])
            assert done + tokens_of(found[request.serial]) == tokens_of(expected[request.serial])
        assert scheduler.load().accepted_tokens > 10


@pytest.mark.parametrize(("page_size", "overlap"), [(1, True), (16, False)])
def test_what_was_asked_before_is_foreseen_from_the_cache(
    make: Any, plain: Callable[[str], Answers], store: GrammarStore, page_size: int, overlap: bool
) -> None:
    expected = plain("llama")
    scheduler, runner = make(speculate="prefix", page_size=page_size, num_pages=2048 // page_size)
    assert_alike(run(scheduler, runner, overlap, requests(store)), expected)
    first = scheduler.load()
    assert_alike(run(scheduler, runner, overlap, requests(store)), expected)
    again = scheduler.load()
    drafted = again.drafted_tokens - first.drafted_tokens
    accepted = again.accepted_tokens - first.accepted_tokens
    assert accepted > 60 and accepted > 0.7 * drafted


def test_greedy_text_that_repeats_itself_is_foreseen_and_a_request_can_say_no(make: Any) -> None:
    def ask(speculate: bool) -> list[Request]:
        settings = {"temperature": 0.0, "max_tokens": 80, "ignore_eos": True, "speculate": speculate}
        return [Request(at, f"r{at}", prompt, SamplingParams(**settings)) for at, prompt in enumerate(prompts()[:6])]

    found = []
    for speculate in (False, True):
        scheduler, runner = make(speculate="prefix", prefix_cache=False)
        found.append(run(scheduler, runner, False, ask(speculate)))
        assert (scheduler.load().accepted_tokens > 30) == (scheduler.load().drafted_tokens > 0) == speculate
    assert_alike(*found)


def test_auto_measures_steps_and_changes_no_token(
    make: Any, plain: Callable[[str], Answers], store: GrammarStore
) -> None:
    expected = plain("llama")
    scheduler, runner = make(speculate="auto", drafter=scripted(expected, 1.0), max_running=2)
    assert_alike(run(scheduler, runner, False, requests(store)), expected)


@pytest.mark.parametrize(("size", "stages"), [(2, 1), (1, 2)])
def test_ranks_of_a_split_model_check_drafts_alike(
    tiny_model: Any, store: GrammarStore, size: int, stages: int
) -> None:
    settings: dict[str, Any] = {"page_size": 16, "num_pages": 128, "max_running": 8}

    def both(runner: Any) -> tuple[Answers, Answers, int, int]:
        found: list[Answers] = []
        for speculate in ("off", "prefix"):
            drafter = scripted(found[0], 0.8) if found else None
            wanted: dict[str, Any] = {"context_length": 512, "eos_token_ids": frozenset({0}), "speculate": speculate}
            scheduler = scheduler_for(runner.info, masks=TokenMasks(VOCAB), drafter=drafter, **wanted)
            found.append(run(scheduler, runner, False, requests(store)[8:18]))
        load = scheduler.load()
        return *found, load.accepted_tokens, load.drafted_tokens

    expected, found, accepted, drafted = run_group(
        size, tiny_model("llama", **SHAPE).path, both, stages=stages, **settings
    )
    assert_alike(found, expected)
    assert 30 < accepted < drafted
