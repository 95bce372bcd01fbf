"""Logit processors of an installed package, over scheduler and runner: alone, in batches, put back, drafted, on two ranks."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest

from sapwood_common.contract.sampling import LogitProcessorCall, SamplingParams
from sapwood_testing.drafts.scripted_drafter import ScriptedDrafter
from sapwood_testing.worker.model_scheduler import scheduler_for
from sapwood_testing.worker.ranks.group_of_threads import run_group
from sapwood_testing.worker.split_models import SHAPE
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.scheduler import Scheduler
from sapwood_worker.records.output import RequestOutput

FIELD = "sampling.logit_processors"
SOURCE = """
import torch

class Fresh:
    \"\"\"No token comes twice; after so many it fails. Its answers depend on all of the output.\"\"\"

    def __init__(self, parameters, prompted):
        unknown = parameters.keys() - {"fail_after", "shape", "nothing"}
        if unknown:
            raise ValueError(f"unknown: {sorted(unknown)[0]}")
        self.parameters = parameters
        self.prompt = list(prompted.prompt)
        assert prompted.vocab_size > len(self.prompt) and prompted.eos_token_ids

    def __call__(self, logits, output):
        if len(output) == self.parameters.get("fail_after"):
            raise RuntimeError("no more")
        if self.parameters.get("shape"):
            return logits[:3]
        if self.parameters.get("nothing"):
            return torch.full_like(logits, -torch.inf)
        logits[list(output)] = -torch.inf
        return logits + (len(output) + len(self.prompt)) * torch.cos(torch.arange(len(logits), dtype=torch.float32))
"""


@pytest.fixture(autouse=True)
def package(plugin: Any) -> None:
    plugin("sapwood.logit_processors", "fresh", SOURCE, "Fresh")


def called(**parameters: Any) -> tuple[LogitProcessorCall, ...]:
    return (LogitProcessorCall("fresh", parameters),)


def asked() -> list[Request]:
    """Some with the processor and some without, one of which fails in the middle."""
    wanted: list[dict[str, Any]] = [
        {"logit_processors": called()},
        {},
        {"logit_processors": called(), "temperature": 0.0, "repetition_penalty": 1.2, "logprobs": 1},
        {"logit_processors": called(fail_after=5)},
        {"temperature": 0.0},
        {"logit_processors": called(), "min_tokens": 9, "bad_words_ids": ((7,), (8, 9))},
    ]
    return [
        Request(
            serial,
            f"r{serial}",
            array("I", range(3, 20 + 3 * serial)),
            SamplingParams(seed=serial, max_tokens=20, **each),
        )
        for serial, each in enumerate(wanted)
    ]


def asked_of_one_prompt() -> list[Request]:
    """Likewise, with the same prompt."""
    wanted = [called(), (), called(fail_after=0), called(fail_after=2), called()]
    return [
        Request(serial, f"r{serial}", range(3, 30), SamplingParams(seed=serial, max_tokens=6, logit_processors=each))
        for serial, each in enumerate(wanted)
    ]


def make_scheduler(runner: Any, drafter: Any = None, **settings: Any) -> Scheduler:
    sizes = {"context_length": 256, "max_running": 8, "max_step_tokens": 48}
    return scheduler_for(runner.info, drafter=drafter, eos_token_ids=frozenset({2}), **(sizes | settings))


def run(
    scheduler: Scheduler, runner: Any, requests: list[Request], retract_at: int = -1
) -> dict[int, list[RequestOutput]]:
    for request in requests:
        scheduler.add(request)
    found: dict[int, list[RequestOutput]] = {request.serial: [] for request in requests}
    steps = 0
    while scheduler.has_work:
        for output in scheduler.update(runner.execute(scheduler.schedule())):
            found[output.serial].append(output)
        steps += 1
        if steps == retract_at:
            scheduler.pause(retract=True)
            scheduler.resume()
    return found


def tokens_of(found: dict[int, list[RequestOutput]]) -> dict[int, list[int]]:
    return {serial: [token for each in outputs for token in each.token_ids] for serial, outputs in found.items()}


@pytest.mark.slow
def test_a_batch_a_retraction_and_drafts_change_no_token(make_runner: Any, tiny_model: Any) -> None:
    path = tiny_model("llama", **SHAPE).path
    runner = make_runner(path)
    assert runner.info.logit_processors == ("fresh",)
    alone: dict[int, list[int]] = {}
    for request in asked():
        alone |= tokens_of(run(make_scheduler(runner), runner, [request]))
    found = run(make_scheduler(runner), runner, asked())
    assert tokens_of(found) == alone
    for serial in (0, 2, 5):
        assert len(set(alone[serial])) == len(alone[serial]) == 20 or alone[serial][-1] == 2
    assert len(alone[3]) == 5
    last = found[3][-1]
    assert (last.finish_reason, last.error_field) == ("error", FIELD)
    assert last.error == "logit processor 'fresh' failed: RuntimeError: no more"
    assert all(outputs[-1].finish_reason in ("stop", "length") for serial, outputs in found.items() if serial != 3)
    assert tokens_of(run(make_scheduler(runner), runner, asked(), retract_at=8)) == alone
    drafter = ScriptedDrafter(lambda request: iter(alone[request.serial] + [3] * 40), random.Random(1), 0.9, 97)
    drafting = make_scheduler(runner, drafter, speculate="prefix")
    drafted = run(drafting, runner, asked())
    assert tokens_of(drafted) == alone
    assert drafting.load().accepted_tokens > 0
    assert all(drafted[serial][-1].drafted_tokens == 0 for serial in (0, 2, 5))


def test_requests_that_share_a_prompts_last_logits_are_each_processed_alone(make_runner: Any, tiny_model: Any) -> None:
    runner = make_runner(tiny_model("llama", **SHAPE).path)
    alone: dict[int, list[int]] = {}
    for request in asked_of_one_prompt():
        alone |= tokens_of(run(make_scheduler(runner), runner, [request]))
    found = run(make_scheduler(runner), runner, asked_of_one_prompt())
    assert tokens_of(found) == alone
    assert [found[serial][-1].cached_tokens for serial in range(5)] == [0, 27, 27, 27, 27]
    assert [found[serial][-1].finish_reason == "error" for serial in range(5)] == [False, False, True, True, False]


def test_a_request_that_goes_on_elsewhere_goes_on_alike(make_runner: Any, tiny_model: Any) -> None:
    runner = make_runner(tiny_model("llama", **SHAPE).path)
    whole = tokens_of(run(make_scheduler(runner), runner, asked()[:1]))[0]
    first = asked()[0]
    resumed = Request(0, "r0", [*first.token_ids, *whole[:7]], first.sampling, output_tokens=7)
    resumed.max_length -= 7
    assert tokens_of(run(make_scheduler(runner), runner, [resumed]))[0] == whole[7:]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"nope": 1}, "refuses its parameters: ValueError: unknown: nope"),
        ({"shape": True}, "failed: TypeError: it has to return"),
        ({"nothing": True}, "left no token"),
    ],
)
def test_what_is_wrong_ends_the_request_and_no_other(
    make_runner: Any, tiny_model: Any, parameters: dict[str, Any], message: str
) -> None:
    runner = make_runner(tiny_model("llama", **SHAPE).path)
    wrong = Request(9, "wrong", [5, 6], SamplingParams(max_tokens=5, logit_processors=called(**parameters)))
    found = run(make_scheduler(runner), runner, [wrong, asked()[1]])
    [end] = found[9]
    assert (end.token_ids, end.finish_reason, end.error_field) == ([], "error", FIELD)
    assert message in end.error
    assert found[1][-1].finish_reason in ("stop", "length")


def test_two_ranks_choose_the_same_tokens(make_runner: Any, tiny_model: Any) -> None:
    path = tiny_model("llama", **SHAPE).path
    sizes = {"page_size": 16, "num_pages": 128, "max_running": 8}

    def work(runner: Any) -> list[dict[int, list[int]]]:
        found = [run(make_scheduler(runner), runner, asked(), retract_at=8)]
        return [*map(tokens_of, [*found, run(make_scheduler(runner), runner, asked_of_one_prompt())])]

    runner = make_runner(path, **sizes)
    assert run_group(2, path, work, **sizes) == work(runner)
