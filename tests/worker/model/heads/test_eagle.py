"""A head of EAGLE-3: its checkpoint is read, what it says is a plain computation's, and drafts with it change no token."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from torch import Tensor

from sapwood_common.errors import ConfigError
from sapwood_testing.drafts.answers import (
    assert_alike,
    assert_stopped,
    requests,
    run,
    stop_strings,
    tokens_of,
)
from sapwood_testing.drafts.drafted import check_each_draft, options, run_split, scheduler_of
from sapwood_testing.drafts.eagle_head import WIDTH, PlainHead, random_tensors, write
from sapwood_testing.drafts.fitted_head import GREEDY, PROMPTS, greedy_ones
from sapwood_testing.worker.eager_graphs import with_graphs
from sapwood_worker.config import WorkerConfig
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.model.grammar.llguidance import GrammarStore
from sapwood_worker.model.runner.attention_builder import AttentionBuilder
from sapwood_worker.model.runner.builder import build_headed_runner, build_runner
from sapwood_worker.model.runner.drafting_runner import DraftingRunner
from sapwood_worker.model.runner.factory import make_runner as make_worker_runner


@pytest.mark.parametrize(
    ("page_size", "taken", "changes"),
    [
        pytest.param(1, (0, 2, 3), {}, marks=pytest.mark.slow, id="page-1"),
        pytest.param(16, (0, 2, 3), {}, id="ids-of-inputs"),
        pytest.param(
            16,
            (2, 3),
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}, "norm_before_residual": True},
            id="ids-of-outputs-as-SpecForge-writes-them",
        ),
        pytest.param(
            16,
            (0, 2, 3),
            {"eagle_config": None, "eagle_aux_hidden_state_layer_ids": [3, 0, 2]},
            id="ids-as-vLLM-reads-them",
        ),
    ],
)
def test_what_it_says_is_what_a_plain_computation_says(
    tiny_model: Any, tmp_path: Path, page_size: int, taken: tuple[int, ...], changes: dict[str, Any]
) -> None:
    tiny, tensors = tiny_model("llama"), random_tensors()
    tensors["fc.weight"] = tensors["fc.weight"][:, : len(taken) * WIDTH].contiguous()
    path = write(tmp_path / "head", tensors, torchs_own=page_size == 1, **changes)
    sized = options(tiny.path, page_size=page_size, num_pages=128 * 16 // page_size)
    runner = build_headed_runner(sized, path)
    scheduler = scheduler_of(runner, "eagle")
    plain = PlainHead(tensors, tiny.oracle, taken, normed="norm_before_residual" in changes)
    lengths = check_each_draft(scheduler, plain)
    run(
        scheduler,
        runner,
        True,
        [Request(at, f"r{at}", [3 + at, *range(5, 30)][: 1 + 9 * at], GREEDY) for at in range(3)],
    )
    assert sum(lengths) > 20 and max(lengths) > 3


@pytest.mark.parametrize("page_size", [1, 16])
def test_what_graphs_say_in_a_chain_is_what_is_said_step_by_step(
    tiny_model: Any, trained: Path, page_size: int
) -> None:
    def asked() -> list[Request]:
        drawn = Request(9, "drawn", PROMPTS[7], replace(GREEDY, temperature=0.8, seed=1))
        return [*greedy_ones()[1:6], drawn]

    drafts: list[list[Any]] = [[], []]
    for chains in (False, True):
        sized = options(tiny_model("llama").path, page_size=page_size, num_pages=128 * 16 // page_size)
        runner = build_headed_runner(sized, trained)
        assert runner.draft is not None
        if chains:
            with_graphs(runner.draft, [1, 2, 4, 8])
        scheduler = scheduler_of(runner, "eagle")
        drafter: Any = scheduler._speculation._drafter  # type: ignore[union-attr]

        def noted(decodes: Any, wanted: Any, fill: Any = drafter.fill, said: list[Any] = drafts[chains]) -> Any:
            wanted = [
                draft[: 1 + (request.serial + request.generated) % 6]
                for request, draft in zip(decodes, wanted, strict=True)
            ]
            said.append(fill(decodes, wanted))
            return said[-1]

        drafter.fill = noted
        run(scheduler, runner, True, asked()[:5])
        chained = drafter.chained
        assert (chained > 20) == chains
        run(scheduler, runner, True, asked()[5:])
        assert (drafter.chained > chained) == chains, "what is drawn too"
        assert scheduler.load().accepted_tokens > 15
    assert drafts[0] == drafts[1]
    assert any(len({len(draft) for draft in each}) > 3 for each in drafts[1]), "some drafts end before others"


@pytest.mark.parametrize("page_size", [1, 16])
def test_checks_follow_drafts_and_heads_follow_checks_without_the_host(
    tiny_model: Any, trained: Path, page_size: int
) -> None:
    """Also where a request ends at a token that the host would have cut a draft at, and what is drafted is the plain head's."""
    tiny = tiny_model("llama")
    plain = build_runner(options(tiny.path))
    expected = run(scheduler_of(plain), plain, False, greedy_ones())
    stopped = {at: tokens_of(expected[at])[20 + at] for at in range(4)}

    def asked() -> list[Request]:
        ends = [(stopped[at],) if at in stopped else () for at in range(8)]
        changes: list[dict[str, Any]] = [{"stop_token_ids": end} for end in ends]
        changes += [{"temperature": 0.7, "seed": 4}, {"logprobs": 2}, {"repetition_penalty": 1.2, "max_tokens": 6}]
        return [Request(at, f"g{at}", PROMPTS[at % 8], replace(GREEDY, **change)) for at, change in enumerate(changes)]

    sized = options(tiny.path, page_size=page_size, num_pages=128 * 16 // page_size)
    runner = build_headed_runner(sized, trained)
    draft, head = runner.draft, PlainHead(load_file(trained / "model.safetensors"), tiny.oracle)
    assert isinstance(draft, DraftingRunner)
    for each in (runner, draft):
        with_graphs(each, [1, 2, 4, 8, 16, 32])
    scheduler, checked, launch = scheduler_of(runner, "eagle"), [], runner.launch
    speculation: Any = scheduler._speculation
    speculation._trials.rate = 0.9
    settle, compared = speculation._drafter.settle, 0

    def noted(step: Any) -> Any:
        launched = launch(step)
        checked.append((step.late, len(step.rows)))
        return launched

    def settled() -> float:
        nonlocal compared
        parts = speculation._drafter._late_parts
        seconds: float = settle()
        for part in parts:
            if part.request.sampling.temperature == 0:
                compared += len(part.draft)
                assert part.draft == head.draft(part.request.token_ids.tolist(), len(part.draft))
        return seconds

    speculation._drafter.settle = settled
    runner.launch = noted  # type: ignore[method-assign]
    found = run(scheduler, runner, True, asked())
    assert_alike(found, run(scheduler_of(plain), plain, False, asked()))
    assert {found[at][-1].finish_reason for at in stopped} == {"stop"}
    late = [rows for late, rows in checked if late is not None]
    assert len(late) > 10 and max(late) > 4 and compared > 50
    assert draft.taken > len(late) // 2
    load = scheduler.load()
    assert load.drafted_tokens > load.accepted_tokens > 15


def test_a_head_that_fails_behind_a_check_is_not_asked_there_again(
    tiny_model: Any, trained: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tiny_model("llama").path
    plain, runner = build_runner(options(path)), build_headed_runner(options(path), trained)
    assert isinstance(runner.draft, DraftingRunner)
    with_graphs(runner, [8, 32])
    graphs = with_graphs(runner.draft, [8, 32])
    compute = graphs.run

    def failing(*given: Any, **more: Any) -> Any:
        if more.get("late") is not None:
            raise RuntimeError("out of memory")
        return compute(*given, **more)

    graphs.run = failing  # type: ignore[method-assign]
    scheduler = scheduler_of(runner, "eagle")
    found = run(scheduler, runner, True, greedy_ones())
    assert_alike(found, run(scheduler_of(plain), plain, False, greedy_ones()))
    assert scheduler.load().accepted_tokens > 10 and runner.draft.taken == 0
    assert [record.message for record in caplog.records if record.exc_info] == [
        "the head failed behind a check; it computes nothing there any more"
    ]


def test_tokens_are_those_without_a_head_and_some_of_what_it_says_is_right(
    tiny_model: Any, trained: Path, store: GrammarStore
) -> None:
    path = tiny_model("llama").path
    plain, drafted = build_runner(options(path)), build_headed_runner(options(path, num_pages=40), trained)
    scheduler = scheduler_of(drafted, "eagle")
    assert_alike(run(scheduler, drafted, True, greedy_ones()), run(scheduler_of(plain), plain, False, greedy_ones()))
    load = scheduler.load()
    assert load.drafter == "eagle"
    assert load.drafted_tokens >= load.accepted_tokens > 15
    chosen = [0, 1, 3, 4, 5, 9, 14, 16]
    expected = run(scheduler_of(plain), plain, False, [requests(store)[at] for at in chosen])
    for _ in range(2):  # the second time on the prefix cache
        assert_alike(run(scheduler, drafted, True, [requests(store)[at] for at in chosen]), expected)
    assert scheduler.load().drafted_tokens > load.drafted_tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page_size", "num_pages", "max_running", "overlap"),
    [(16, 128, 1, True), (1, 2048, 32, True), (16, 128, 32, False), (4, 30, 8, True)],
)
def test_twenty_requests_of_every_kind_are_those_without_a_head(
    tiny_model: Any,
    trained: Path,
    store: GrammarStore,
    page_size: int,
    num_pages: int,
    max_running: int,
    overlap: bool,
) -> None:
    path = tiny_model("llama").path
    plain = build_runner(options(path))
    expected = run(scheduler_of(plain), plain, False, requests(store))
    sized = options(path, page_size=page_size, num_pages=num_pages, max_running=max_running)
    drafted = build_headed_runner(sized, trained)
    scheduler, stops = scheduler_of(drafted, "eagle"), stop_strings(expected)
    found = run(scheduler, drafted, overlap, [*requests(store), *greedy_ones(100)], stops)
    for number in range(len(PROMPTS)):  # what it was fitted to: some of it is right
        found.pop(100 + number)
    assert_stopped(found, expected, stops)
    assert_alike(found, expected, stops)
    load = scheduler.load()
    assert load.drafted_tokens > load.accepted_tokens > 0
    assert (scheduler.num_retractions > 0) == (num_pages == 30)


def test_a_request_that_goes_on_at_a_worker_with_another_head_stays_the_same(
    tiny_model: Any, trained: Path, tmp_path: Path
) -> None:
    path = tiny_model("llama").path
    first = build_headed_runner(options(path), trained)
    expected = run(scheduler_of(first, "eagle"), first, True, greedy_ones())
    second = build_headed_runner(options(path, page_size=1, num_pages=1024), write(tmp_path / "head", random_tensors()))
    scheduler = scheduler_of(second, "eagle")
    resumed = []
    for request in greedy_ones():
        done = tokens_of(expected[request.serial])[: 3 + request.serial]
        sampling = replace(request.sampling, max_tokens=request.sampling.max_tokens - len(done))
        prompt = [*request.token_ids, *done]
        resumed.append(Request(request.serial, "again", prompt, sampling, output_tokens=len(done)))
    found = run(scheduler, second, True, resumed)
    for serial, outputs in found.items():
        assert tokens_of(expected[serial])[: 3 + serial] + tokens_of(outputs) == tokens_of(expected[serial])
    assert scheduler.load().drafted_tokens > 0


@pytest.mark.parametrize("own_table", [False, True])
def test_rank_0s_head_drafts_for_all_ranks_of_a_split_model(
    tiny_model: Any, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_table: bool
) -> None:
    """No rank has graphs of prompts, which pad them: they exchange equally much."""
    tiny = tiny_model("llama")
    head = trained
    if own_table:
        tensors = load_file(trained / "model.safetensors")
        table = tiny.oracle.model.embed_tokens.weight.detach().clone()
        head = write(tmp_path / "head", tensors | {"embed_tokens.weight": table})
    alone = build_runner(options(tiny.path))
    expected = run(scheduler_of(alone), alone, False, greedy_ones())
    monkeypatch.setattr(AttentionBuilder, "pieces", lambda *_, **__: pytest.fail("a rank makes graphs of prompts"))
    build = partial(build_headed_runner, folder=head)
    plain, found, accepted, _ = run_split(tiny.path, build, "eagle", greedy_ones)
    assert_alike(plain, expected)
    assert_alike(found, expected)
    assert accepted > 15


@pytest.mark.slow
def test_windows_and_pages_that_run_out_change_no_token(tiny_model: Any, tmp_path: Path, store: GrammarStore) -> None:
    path = write(tmp_path / "head", random_tensors())
    tiny = tiny_model("gemma3").path
    plain = build_runner(options(tiny))
    drafted = build_headed_runner(options(tiny, page_size=4, num_pages=30), path)
    expected = run(scheduler_of(plain), plain, False, requests(store)[:8])
    scheduler = scheduler_of(drafted, "eagle")
    found = run(scheduler, drafted, True, requests(store)[:8])
    assert {serial: tokens_of(each) for serial, each in found.items()} == {
        serial: tokens_of(each) for serial, each in expected.items()
    }
    assert scheduler.num_retractions > 0 and scheduler.load().drafted_tokens > 0


def _without(name: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.pop(name)


def _reshaped(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: torch.zeros(3, 3)})


@pytest.mark.parametrize(
    ("spoil", "changes", "said"),
    [
        (_without("fc.weight"), {}, "tensor fc.weight is missing"),
        (_without("d2t"), {}, "tensor d2t is missing"),
        (_reshaped("midlayer.mlp.up_proj.weight"), {}, r"up_proj.weight has shape \[3, 3\], not \[80, 48\]"),
        (_reshaped("other.weight"), {}, "tensor other.weight is no part of a head"),
        (lambda tensors: tensors["d2t"].fill_(90), {}, "d2t names tokens that the model does not have"),
        (lambda tensors: None, {"vocab_size": 98}, "98 tokens, this model's 97"),
        (lambda tensors: None, {"eagle_config": None}, r"the layers \[2, 2, 1\] are"),
        (lambda tensors: None, {"eagle_config": None, "eagle_aux_hidden_state_layer_ids": [2, 5]}, "the model has 4"),
        (lambda tensors: None, {"hidden_size": 32, "head_dim": 16}, "not as wide as the model"),
    ],
)
def test_a_checkpoint_that_is_none_for_this_model_is_refused(
    tiny_model: Any, tmp_path: Path, spoil: Any, changes: dict[str, Any], said: str
) -> None:
    tensors = random_tensors()
    spoil(tensors)
    path = write(tmp_path / "head", tensors, **changes)
    with pytest.raises(ConfigError, match=said):
        make_worker_runner(WorkerConfig(model=str(tiny_model("llama").path), speculate=f"eagle:{path}", num_pages=64))


class Runs:
    """A pickle of it calls a function of its reader's."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self._trace,)


@pytest.mark.parametrize("kind", ["pickle", "torch"])
def test_a_head_that_is_a_pickle_runs_nothing(tiny_model: Any, tmp_path: Path, kind: str) -> None:
    path, trace = write(tmp_path / "head", random_tensors()), tmp_path / "trace"
    (path / "model.safetensors").unlink()
    file = path / "pytorch_model.bin"
    if kind == "pickle":
        file.write_bytes(pickle.dumps({"fc.weight": Runs(trace)}))
    else:
        torch.save({"fc.weight": Runs(trace)}, file)
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin: "):
        make_worker_runner(WorkerConfig(model=str(tiny_model("llama").path), speculate=f"eagle:{path}", num_pages=64))
    assert not trace.exists()
