"""A draft model changes no token: scheduler, model and draft model compared with the same without, whatever is asked for and
continues."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.errors import ConfigError
from sapwood_testing.drafts.answers import (
    Answers,
    assert_alike,
    assert_stopped,
    requests,
    run,
    stop_strings,
    tokens_of,
)
from sapwood_testing.drafts.drafted import options, run_split, scheduler_of
from sapwood_testing.worker.eager_graphs import with_graphs
from sapwood_testing.worker.split_models import SHAPE
from sapwood_worker.config import WorkerConfig
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.model.grammar.llguidance import GrammarStore
from sapwood_worker.model.quantizer.drafter import make_drafter
from sapwood_worker.model.runner.builder import build_drafted_runner, build_runner
from sapwood_worker.model.runner.factory import make_runner as make_worker_runner
from sapwood_worker.model.runner.model_runner import ModelRunner


@pytest.fixture(scope="module")
def drafter(tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A model's first layers, or all with noise; made once."""
    folder = tmp_path_factory.mktemp("drafters")

    def drafter_(name: str, layers: int | None = None, noise: float = 0.0) -> Path:
        path: Path = folder / f"{name}-{layers}-{noise}"
        if not path.exists():
            make_drafter(tiny_model(name).path, path, layers=layers, noise=noise)
        return path

    return drafter_


FEW = (0, 1, 3, 5, 7, 9, 14, 16)
"""Of the twenty requests: greedy and seeded ones, penalties, biases, bans, log probabilities, a regular expression, a schema."""


def few(store: GrammarStore) -> list[Request]:
    return [request for request in requests(store) if request.serial in FEW]


@pytest.fixture(scope="module")
def plain(tiny_model: Any, store: GrammarStore) -> Callable[..., Answers]:
    """A model's answers without drafts, of few or all requests."""
    known: dict[tuple[str, bool], Answers] = {}

    def plain_(name: str, whole: bool = False) -> Answers:
        if (name, whole) not in known:
            runner = build_runner(options(tiny_model(name).path))
            asked = requests(store) if whole else few(store)
            known[name, whole] = run(scheduler_of(runner), runner, False, asked)
        return known[name, whole]

    return plain_


def test_drafts_that_graphs_chain_are_right_where_the_draft_model_is_the_model(tiny_model: Any) -> None:
    path = tiny_model("llama").path
    runner = build_drafted_runner(options(path, page_size=4), options(path, page_size=4))
    assert runner.draft is not None
    with_graphs(runner.draft, [1, 2, 4])
    scheduler = scheduler_of(runner)
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    alone = [Request(at, f"r{at}", [3 + at, 9, 11], greedy) for at in range(3)]
    found = run(scheduler, runner, True, alone)
    without = build_runner(options(path))
    asked = [Request(at, f"r{at}", [3 + at, 9, 11], greedy) for at in range(3)]
    assert_alike(found, run(scheduler_of(without), without, False, asked))
    chaining: Any = scheduler._speculation._drafter  # type: ignore[union-attr]
    load = scheduler.load()
    assert chaining.chained > 3 and load.accepted_tokens == load.drafted_tokens > 30


@pytest.mark.parametrize(
    ("name", "page_size", "num_pages", "max_running", "overlap"),
    [
        ("llama", 4, 24, 8, True),
        pytest.param("llama", 4, 30, 8, False, marks=pytest.mark.slow),
        pytest.param("llama", 16, 128, 12, True, marks=pytest.mark.slow),
        pytest.param("gemma3", 1, 300, 8, True, marks=pytest.mark.slow),
        pytest.param("mistral-window", 4, 300, 8, True, marks=pytest.mark.slow),
        pytest.param("llama", 16, 128, 1, False, marks=pytest.mark.slow),
        pytest.param("llama", 1, 2048, 32, True, marks=pytest.mark.slow),
        pytest.param("gemma3", 16, 128, 32, False, marks=pytest.mark.slow),
        pytest.param("deepseek-v3", 16, 128, 8, False, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_without_a_draft_model(
    tiny_model: Any,
    drafter: Callable[..., Path],
    plain: Callable[..., Answers],
    store: GrammarStore,
    name: str,
    page_size: int,
    num_pages: int,
    max_running: int,
    overlap: bool,
) -> None:
    whole = num_pages != 24
    expected, asked = plain(name, whole), requests(store) if whole else few(store)
    own = options(tiny_model(name).path, page_size=page_size, num_pages=num_pages, max_running=max_running)
    runner = build_drafted_runner(own, options(drafter(name, noise=0.02), page_size=page_size))
    scheduler = scheduler_of(runner, max_step_tokens=64)
    stops = stop_strings(expected)
    found = run(scheduler, runner, overlap, asked, stops)
    assert_stopped(found, expected, stops)
    assert_alike(found, expected, stops)
    load = scheduler.load()
    assert load.drafted_tokens - load.accepted_tokens > 5
    assert load.accepted_tokens > 20
    assert (scheduler.num_retractions > 0) == (num_pages <= 30)


def test_a_draft_model_equal_to_the_model_is_right_wherever_the_model_chooses(
    tiny_model: Any, plain: Callable[..., Answers], store: GrammarStore
) -> None:
    path = tiny_model("llama").path
    runner = build_drafted_runner(options(path), options(path))
    scheduler = scheduler_of(runner)
    found = run(scheduler, runner, True, [each for each in few(store) if each.serial in (0, 1, 5, 9)])
    for serial, outputs in found.items():
        assert tokens_of(outputs) == tokens_of(plain("llama")[serial])
    load = scheduler.load()
    assert load.accepted_tokens == load.drafted_tokens > 50


@pytest.mark.slow
def test_a_models_first_layers_draft_for_it(
    tiny_model: Any, drafter: Callable[..., Path], plain: Callable[..., Answers], store: GrammarStore
) -> None:
    runner = build_drafted_runner(options(tiny_model("llama").path), options(drafter("llama", layers=3)))
    scheduler = scheduler_of(runner)
    assert_alike(run(scheduler, runner, True, few(store)), plain("llama"))
    assert scheduler.load().drafted_tokens > scheduler.load().accepted_tokens > 0


def test_a_request_that_goes_on_elsewhere_is_drafted_for_and_stays_the_same(
    tiny_model: Any, drafter: Callable[..., Path], plain: Callable[..., Answers], store: GrammarStore
) -> None:
    expected = plain("llama")
    runner = build_drafted_runner(options(tiny_model("llama").path), options(drafter("llama", noise=0.02)))
    scheduler = scheduler_of(runner)
    for request in few(store)[1:5]:
        done = tokens_of(expected[request.serial])[:7]
        sampling = replace(request.sampling, max_tokens=request.sampling.max_tokens - 7)
        again = Request(request.serial, "again", [*request.token_ids, *done], sampling, output_tokens=7)
        found = run(scheduler, runner, True, [again])
        assert done + tokens_of(found[request.serial]) == tokens_of(expected[request.serial])
    assert scheduler.load().accepted_tokens > 5


@pytest.mark.slow
def test_rank_0_drafts_for_all_ranks_of_a_split_model(tiny_model: Any, tmp_path: Path, store: GrammarStore) -> None:
    path = tiny_model("llama", **SHAPE).path
    make_drafter(path, tmp_path / "draft", layers=None, noise=0.05)
    build = partial(build_drafted_runner, draft=options(tmp_path / "draft"))
    expected, found, accepted, _ = run_split(path, build, "draft", lambda: few(store))
    assert_alike(found, expected)
    assert accepted > 15


def test_memory_is_shared_with_the_draft_models_pages(tiny_model: Any, drafter: Callable[..., Path]) -> None:
    path, memory = tiny_model("llama").path, {"num_pages": None, "kv_cache_bytes": 1 << 22}
    alone = build_runner(options(path, **memory))
    drafted = build_drafted_runner(options(path, **memory), options(drafter("llama", noise=0.05)))
    assert drafted.draft is not None
    assert drafted.draft.info.num_pages == drafted.info.num_pages
    assert abs(2 * drafted.info.num_pages - alone.info.num_pages) <= 2


def test_a_worker_is_told_of_a_draft_model_by_a_flag(tiny_model: Any, drafter: Callable[..., Path]) -> None:
    path, draft = tiny_model("llama").path, drafter("llama", layers=2)
    runner = make_worker_runner(WorkerConfig(model=str(path), speculate=f"draft:{draft}", num_pages=64, threads=1))
    assert isinstance(runner, ModelRunner) and runner.draft is not None
    assert runner.draft.info.num_pages == 64


@pytest.mark.parametrize(
    ("speculate", "said"), [("draft:", "names no model"), ("often", "none of auto"), ("prefix:x", "none of auto")]
)
def test_what_is_no_way_to_draft_is_refused(speculate: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        WorkerConfig(speculate=speculate)


def test_a_draft_model_that_is_not_there_or_has_another_vocabulary_is_refused(tiny_model: Any, tmp_path: Path) -> None:
    path = str(tiny_model("llama").path)
    with pytest.raises(ConfigError, match="--speculate: "):
        make_worker_runner(WorkerConfig(model=path, speculate=f"draft:{tmp_path / 'none'}", num_pages=64))
    other = tiny_model("llama", vocab_size=101).path
    with pytest.raises(ConfigError, match="101 tokens, the model's has 97"):
        make_worker_runner(WorkerConfig(model=path, speculate=f"draft:{other}", num_pages=64))
