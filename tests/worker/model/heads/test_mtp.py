"""The layer for multi-token prediction of DeepSeek and GLM: its drafts are a plain computation's, and change no token."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.errors import ConfigError
from sapwood_testing.drafts.answers import (
    assert_alike,
    assert_stopped,
    requests,
    run,
    stop_strings,
)
from sapwood_testing.drafts.drafted import check_each_draft, options, run_split, scheduler_of
from sapwood_testing.drafts.mtp_head import LAYERS, PlainHead, with_head
from sapwood_worker.config import WorkerConfig
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.model.grammar.llguidance import GrammarStore
from sapwood_worker.model.runner.builder import build_headed_runner, build_runner
from sapwood_worker.model.runner.factory import make_runner as make_worker_runner

PROMPTS = [[3 + at, *range(40, 40 + 4 * at)] for at in range(4)]


def asked() -> list[Request]:
    settings = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    return [Request(serial, f"r{serial}", prompt, settings) for serial, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize("name", ["glm4-moe", pytest.param("deepseek-v3", marks=pytest.mark.slow)])
def test_a_head_drafts_as_a_plain_computation_does_and_changes_no_token(
    tiny_model: Any, tmp_path: Path, name: str
) -> None:
    tiny = tiny_model(name)
    path, extra = with_head(tiny, tmp_path / "model")
    plain = build_runner(options(path))
    expected = run(scheduler_of(plain), plain, False, asked())
    runner = build_headed_runner(options(path, num_pages=24, page_size=8), None)
    scheduler = scheduler_of(runner, "mtp")
    lengths = check_each_draft(scheduler, PlainHead(tiny.oracle, extra))
    assert_alike(run(scheduler, runner, True, asked()), expected)
    assert sum(lengths) > 20 and max(lengths) > 3
    assert scheduler.load().drafter == "mtp"


@pytest.mark.parametrize(
    ("name", "page_size", "num_pages", "max_running", "overlap"),
    [
        ("glm4-moe", 4, 30, 8, True),
        pytest.param("glm4-moe", 16, 128, 1, False, marks=pytest.mark.slow),
        pytest.param("glm4-moe", 1, 2048, 32, True, marks=pytest.mark.slow),
        pytest.param("deepseek-v3", 16, 128, 32, False, marks=pytest.mark.slow),
        pytest.param("deepseek-v3", 1, 480, 8, True, marks=pytest.mark.slow),
    ],
)
def test_twenty_requests_of_every_kind_are_those_without_a_head(
    tiny_model: Any,
    tmp_path: Path,
    store: GrammarStore,
    name: str,
    page_size: int,
    num_pages: int,
    max_running: int,
    overlap: bool,
) -> None:
    path, _ = with_head(tiny_model(name), tmp_path / "model", part=0.02)
    plain = build_runner(options(path))
    expected = run(scheduler_of(plain), plain, False, requests(store))
    sized = options(path, page_size=page_size, num_pages=num_pages, max_running=max_running)
    runner = build_headed_runner(sized, None)
    scheduler, stops = scheduler_of(runner, "mtp"), stop_strings(expected)
    found = run(scheduler, runner, overlap, requests(store), stops)
    assert_stopped(found, expected, stops)
    assert_alike(found, expected, stops)
    load = scheduler.load()
    assert load.accepted_tokens > 25 and load.drafted_tokens - load.accepted_tokens > 20
    assert (scheduler.num_retractions > 0) == (num_pages == 30)


@pytest.mark.parametrize("name", ["glm4-moe", pytest.param("deepseek-v3", marks=pytest.mark.slow)])
def test_rank_0s_head_drafts_for_all_ranks_of_a_split_model(
    tiny_model: Any, tmp_path: Path, store: GrammarStore, name: str
) -> None:
    path, _ = with_head(tiny_model(name), tmp_path / "model", part=0.02)
    build = partial(build_headed_runner, folder=None)
    expected, found, accepted, rejected = run_split(path, build, "mtp", lambda: requests(store)[9:])
    assert_alike(found, expected)
    assert accepted > 15 and rejected > 0


def test_a_model_without_such_layers_is_refused(tiny_model: Any) -> None:
    with pytest.raises(ConfigError, match=r"--speculate mtp: .* holds no layers"):
        make_worker_runner(WorkerConfig(model=str(tiny_model("llama").path), speculate="mtp", num_pages=64))


def test_a_head_that_lacks_a_tensor_is_refused(tiny_model: Any, tmp_path: Path) -> None:
    path, _ = with_head(tiny_model("glm4-moe"), tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    del tensors[f"model.layers.{LAYERS}.hnorm.weight"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"hnorm\.weight is missing"):
        make_worker_runner(WorkerConfig(model=str(path), speculate="mtp", num_pages=64))
