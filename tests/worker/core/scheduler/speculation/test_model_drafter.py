"""A draft model's keys and values follow its requests: a draft model that is the model itself is always right."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest

from sapwood_common.contract.sampling import SamplingParams
from sapwood_testing.worker.fake_runner import FakeRunner, continuation
from sapwood_worker.core.scheduler.config import SchedulerConfig
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.scheduler import Scheduler
from sapwood_worker.core.scheduler.speculation.model_drafter import DraftModel
from sapwood_worker.records.model_info import ModelInfo
from sapwood_worker.records.step import LaunchedStep, Step

VOCAB = 60
END = 59


class CountingRunner(FakeRunner):
    """Counts what it computes; fails if told to."""

    def __init__(self, info: ModelInfo) -> None:
        super().__init__(info)
        self.computed = 0
        self.fails = False

    def launch(self, step: Step) -> Any:
        self.computed += len(step.token_ids)
        if self.fails:
            raise RuntimeError("out of memory")
        return super().launch(step)


def info(num_pages: int, page_size: int = 4, context_length: int = 96) -> ModelInfo:
    return ModelInfo(
        architecture="fake",
        dtype="none",
        context_length=context_length,
        vocab_size=VOCAB,
        eos_token_ids=(END,),
        page_size=page_size,
        num_pages=num_pages,
    )


class Worker:
    """A scheduler, a model, and a draft model that says the same; ``other`` is what the draft model is asked with."""

    def __init__(
        self, num_pages: int = 64, *, longest: int = 96, budget: int = 64, speculate: Any = "prefix", **config: Any
    ) -> None:
        own = info(num_pages)
        self.draft = CountingRunner(own)
        self.model = FakeRunner(own)
        self.scheduler = Scheduler(
            SchedulerConfig(
                page_size=4,
                num_pages=num_pages,
                context_length=96,
                eos_token_ids=frozenset({END}),
                speculate=speculate,
                conservativeness=0.0,
                **config,
            ),
            drafter=DraftModel(self.draft, longest, budget),
        )
        self.steps = self.serial = 0
        self.ahead = 0

    def ask(self, prompts: list[list[int]], overlap: bool = True, **sampling: Any) -> list[list[int]]:
        """Their answers, each checked."""
        asked: list[Request] = []
        for prompt in prompts:
            params = SamplingParams(**({"seed": self.serial, "max_tokens": 30, "ignore_eos": True} | sampling))
            asked.append(Request(self.serial, f"r{self.serial}", prompt, params))
            self.serial += 1
            self.scheduler.add(asked[-1])
        launched: list[LaunchedStep] = []
        while self.scheduler.has_work:
            while launched and not self.scheduler.plans_ahead:
                self.scheduler.update(launched.pop(0).result())
            self.ahead += bool(launched)
            planned = self.scheduler.schedule()
            if planned:
                self.steps += 1
                launched.append(self.model.launch(planned))
            while len(launched) > int(bool(planned) and overlap):
                self.scheduler.update(launched.pop(0).result())
            self.scheduler.check()
        for request, prompt in zip(asked, prompts, strict=True):
            expected = continuation(prompt, request.sampling, VOCAB)
            for token in request.token_ids[len(prompt) :]:
                assert token == next(expected)
        return [request.token_ids[len(prompt) :].tolist() for request, prompt in zip(asked, prompts, strict=True)]


def some(count: int, longest: int = 30, seed: int = 0) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(VOCAB - 1) for _ in range(chance.randint(1, longest))] for _ in range(count)]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("num_pages", "max_running"), [(160, 1), (160, 8), (30, 8)])
def test_a_draft_model_that_agrees_is_always_right(num_pages: int, max_running: int, overlap: bool) -> None:
    worker = Worker(num_pages, max_running=max_running)
    worker.ask(some(12), overlap)
    load = worker.scheduler.load()
    assert load.accepted_tokens == load.drafted_tokens > 100
    assert (worker.scheduler.num_retractions > 0) == (num_pages == 30)


def test_prefixes_that_requests_share_are_computed_once_by_the_draft_model_too() -> None:
    worker = Worker(max_running=4)
    shared = some(1, seed=5)[0] * 40
    worker.ask([[*shared[:60], 1]])
    before = worker.draft.computed
    worker.ask([[*shared[:60], each] for each in range(2, 6)], max_tokens=8)
    assert worker.draft.computed - before < 60  # but for the cache four times as many
    load = worker.scheduler.load()
    assert load.accepted_tokens == load.drafted_tokens


def test_long_prompts_are_caught_up_in_steps_of_the_draft_models_own_size() -> None:
    worker = Worker(max_running=4, budget=7)
    worker.ask([each * 9 for each in some(4, 6)], max_tokens=20)
    load = worker.scheduler.load()
    assert load.accepted_tokens == load.drafted_tokens > 30


def test_beyond_its_own_context_a_draft_model_is_not_asked() -> None:
    worker = Worker(max_running=2, longest=20)
    worker.ask([list(range(18)), list(range(30))])
    assert worker.scheduler.load().accepted_tokens == worker.scheduler.load().drafted_tokens <= 2


def test_a_request_can_say_no_and_costs_the_draft_model_nothing() -> None:
    worker = Worker(max_running=2)
    worker.ask(some(4), speculate=False)
    assert worker.draft.computed == worker.scheduler.load().drafted_tokens == 0


def test_a_draft_model_that_fails_leaves_the_model_going_on_alone(caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker(max_running=2)
    worker.ask(some(2))
    worker.draft.fails, drafted = True, worker.scheduler.load().drafted_tokens
    worker.ask(some(4, seed=1))
    assert worker.scheduler.load().drafted_tokens == drafted
    assert [record.message for record in caplog.records if record.exc_info] == [
        "the draft model failed; nothing is drafted any more"
    ]


class Stranger(CountingRunner):
    """Says something else than the model."""

    def _compute(self, step: Step, seeds: dict[int, int]) -> Any:
        answer = super()._compute(step, seeds)
        answer.token_ids = [[(each + 1) % VOCAB for each in part] for part in answer.token_ids]
        return answer


def test_a_draft_model_that_is_never_right_is_hardly_asked_and_steps_overlap_again() -> None:
    worker = Worker(max_running=2)
    assert worker.scheduler._speculation is not None
    drafter: Any = worker.scheduler._speculation._drafter
    drafter._model = DraftModel(Stranger(info(64)), 96, 64)
    worker.ask(some(40, 12, seed=2), max_tokens=60)
    load, steps, ahead = worker.scheduler.load(), worker.steps, worker.ahead
    assert load.accepted_tokens == 0 and load.drafted_tokens < 100
    worker.ask(some(20, 12, seed=3), max_tokens=60)
    assert worker.scheduler.load().drafted_tokens - load.drafted_tokens < 12
    assert worker.ahead - ahead > 0.9 * (worker.steps - steps)


def test_a_draft_model_that_is_right_again_is_found_out() -> None:
    worker = Worker(max_running=1)
    assert worker.scheduler._speculation is not None
    drafter: Any = worker.scheduler._speculation._drafter
    agreeing = drafter._model
    drafter._model = DraftModel(Stranger(info(64)), 96, 64)
    worker.ask(some(6, 12, seed=2), max_tokens=60)
    assert worker.scheduler.load().accepted_tokens == 0
    drafter._model, drafter._rows = agreeing, {}
    worker.ask(some(30, 12, seed=4), max_tokens=80)
    assert worker.scheduler.load().accepted_tokens > 200


def test_what_was_drafted_and_was_wrong_is_computed_again() -> None:
    """Row by row what the draft model has is the request's own text: half of what it says is spoilt on the way."""
    worker = Worker(max_running=4)
    chance = random.Random(1)
    assert worker.scheduler._speculation is not None
    drafter: Any = worker.scheduler._speculation._drafter
    fill, clean = drafter.fill, array("I")

    def spoilt(decodes: Any, drafts: Any) -> Any:
        found = fill(decodes, drafts)
        for request, draft in zip(decodes, found, strict=True):
            expected = continuation(request.token_ids[: request.prompt_length], request.sampling, VOCAB)
            answer = [next(expected) for _ in range(request.generated + len(draft))][request.generated :]
            assert draft == answer, "its keys and values are not those of the request's text"
            clean.extend(draft)
            for place in range(len(draft)):
                if chance.random() < 0.2:
                    draft[place] = (draft[place] + 1) % (VOCAB - 1)
        return found

    drafter.fill = spoilt
    worker.ask(some(12))
    load = worker.scheduler.load()
    assert 50 < load.accepted_tokens < load.drafted_tokens == len(clean)
