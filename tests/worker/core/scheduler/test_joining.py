"""Several answers to one prompt: the whole prompt is computed once, and each answer is what it would be alone."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sapwood_common.contract.sampling import SamplingParams
from sapwood_testing.worker.fake_runner import FakeRunner, FakeStep, continuation
from sapwood_worker.core.scheduler.config import SchedulerConfig
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.scheduler import Scheduler
from sapwood_worker.records.model_info import ModelInfo
from sapwood_worker.records.output import RequestOutput

VOCAB = 50
PROMPT = [(7 * place) % VOCAB for place in range(30)]


class Several:
    """Runs requests over a FakeRunner, with a step in flight while the next is planned if ``ahead``; counts what they compute."""

    def __init__(self, ahead: bool = False, poison: int | None = None, **limits: Any) -> None:
        self.config = SchedulerConfig(**({"page_size": 4, "num_pages": 64, "context_length": 128} | limits))
        self.scheduler = Scheduler(self.config)
        sizes: dict[str, Any] = {"page_size": self.config.page_size, "num_pages": self.config.num_pages}
        about: dict[str, Any] = {"architecture": "fake", "dtype": "none", "context_length": self.config.context_length}
        self.runner = FakeRunner(ModelInfo(**about, **sizes, vocab_size=VOCAB, eos_token_ids=()), poison=poison)
        self.ahead = ahead
        self.launched: deque[FakeStep] = deque()
        self.prompts: dict[int, tuple[list[int], SamplingParams]] = {}
        self.received: dict[int, list[int]] = {}
        self.ended: dict[int, RequestOutput] = {}
        self.computed: list[int] = []
        self.joined = 0

    def add(self, count: int, prompt: list[int] = PROMPT, namespace: bytes = b"", **sampling: Any) -> None:
        for _ in range(count):
            serial = len(self.prompts)
            params = SamplingParams(**({"seed": serial, "max_tokens": 6} | sampling))
            self.scheduler.add(Request(serial, f"r{serial}", prompt, params, namespace))
            self.prompts[serial], self.received[serial] = (prompt, params), []

    def plan(self) -> None:
        step = self.scheduler.schedule()
        if step:
            self.computed.append(len(step.token_ids))
            self.joined += len(step.joins)
            self.launched.append(self.runner.launch(step))

    def take(self) -> None:
        for output in self.scheduler.update(self.launched.popleft().result()):
            assert output.serial not in self.ended
            self.received[output.serial] += output.token_ids
            if output.finish_reason is not None:
                self.ended[output.serial] = output
        self.scheduler.check()

    def step(self) -> None:
        if not self.launched or self.scheduler.plans_ahead:
            self.plan()
        while len(self.launched) > int(self.ahead):
            self.take()

    def run(self) -> None:
        for _ in range(2000):
            if not self.scheduler.has_work:
                break
            before = len(self.computed)
            self.step()
            if len(self.computed) == before and self.launched:
                self.take()
        assert not self.scheduler.has_work
        while self.launched:
            self.take()
        self.scheduler.check()

    def check(self, *without: int) -> None:
        for serial, (prompt, sampling) in self.prompts.items():
            if serial not in without:
                expected = list(islice(continuation(prompt, sampling, VOCAB), sampling.max_tokens))
                ends = [place for place, token in enumerate(expected, 1) if token in sampling.stop_token_ids]
                assert self.received[serial] == expected[: ends[0] if ends else None], serial

    def cached(self) -> list[int]:
        return [self.ended[serial].cached_tokens for serial in sorted(self.ended)]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("page_size", [1, 4, 15, 16])
@pytest.mark.parametrize("most", [512, 7])
def test_the_prompt_is_computed_once_for_all(ahead: bool, page_size: int, most: int) -> None:
    several = Several(ahead, page_size=page_size, num_pages=256 // page_size, max_step_tokens=most)
    several.add(5)
    several.run()
    several.check()
    assert several.joined == 4
    assert several.cached() == [0, 30, 30, 30, 30]
    answers = 5 * 5  # the sixth token of an answer is not computed
    assert answers + 30 <= sum(several.computed) <= answers + 30 + 5 * ahead


def test_what_is_cached_but_for_its_last_token_is_computed_once_too() -> None:
    several = Several()
    several.add(1, max_tokens=1)
    several.run()
    several.computed.clear()
    several.add(3, max_tokens=1)
    several.run()
    several.check()
    assert several.computed == [1]
    assert several.cached() == [0, 29, 30, 30]


def test_answers_of_one_token_take_no_step_of_their_own() -> None:
    several = Several()
    several.add(8, max_tokens=1)
    several.run()
    several.check()
    assert several.computed == [30]


def test_an_answer_ends_at_a_first_token_that_stops_it() -> None:
    several = Several()
    several.add(4, stop_token_ids=tuple(range(0, VOCAB, 2)))
    several.run()
    several.check()
    assert several.joined == 3


def test_nothing_joins_where_the_logits_would_differ_or_the_prompts_own_are_wanted() -> None:
    several = Several()
    several.add(1)
    several.add(1, namespace=b"another")
    several.add(1, prompt_logprobs=1)
    several.add(1, prompt=[1, *PROMPT[1:]])
    several.add(1, prompt=PROMPT[:-1])
    several.run()
    several.check()
    assert several.joined == 0


def test_without_a_prefix_cache_each_computes_its_own() -> None:
    several = Several(prefix_cache=False)
    several.add(3)
    several.run()
    several.check()
    assert several.joined == 0 and several.cached() == [0, 0, 0]


def test_who_finds_no_free_row_waits_and_computes_the_last_token() -> None:
    several = Several(max_running=2)
    several.add(4)
    several.run()
    several.check()
    assert several.cached() == [0, 30, 29, 30]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("aborted", [0, 1, 2])
def test_an_abort_during_the_step_concerns_nobody_else(ahead: bool, aborted: int) -> None:
    several = Several(ahead)
    several.add(3)
    several.plan()
    assert several.scheduler.abort(aborted) and not several.scheduler.abort(aborted)
    several.run()
    several.check(aborted)
    assert not several.received[aborted] and sorted(several.ended) == sorted({0, 1, 2} - {aborted})


def test_a_failed_step_ends_all_that_had_joined_it_and_gives_their_rows_back() -> None:
    several = Several(poison=PROMPT[0], max_running=3)
    several.add(3)
    several.plan()
    with pytest.raises(RuntimeError):
        several.launched.popleft().result()
    failed = several.scheduler.fail_step("broken")
    assert sorted(output.serial for output in failed) == [0, 1, 2]
    several.scheduler.check()
    several.add(3, prompt=PROMPT[1:])
    several.run()
    several.check(0, 1, 2)
    assert several.joined == 4


def test_an_older_request_is_not_overtaken_by_one_that_joins() -> None:
    several = Several(max_running=2, conservativeness=0.0)
    several.add(1)
    several.add(1, prompt=[3] * 20)
    several.add(2)
    several.plan()
    assert several.joined == 0
    several.run()
    several.check()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_requests_with_few_prompts_get_what_they_would_get_alone(data: st.DataObject) -> None:
    page_size = data.draw(st.sampled_from([1, 2, 4, 16]))
    several = Several(
        data.draw(st.booleans()),
        page_size=page_size,
        num_pages=data.draw(st.integers(-(-48 // page_size), 160 // page_size)),
        context_length=48,
        max_running=data.draw(st.integers(1, 6)),
        max_step_tokens=data.draw(st.integers(1, 40)),
        conservativeness=0.0,
    )
    aborted: set[int] = set()
    for _ in range(data.draw(st.integers(1, 6))):
        prompt = PROMPT[: data.draw(st.sampled_from([1, 5, 29, 30]))]
        several.add(data.draw(st.integers(1, 4)), prompt=prompt, max_tokens=data.draw(st.integers(1, 9)))
        for _ in range(data.draw(st.integers(0, 3))):
            several.step()
        if data.draw(st.booleans()):
            serial = data.draw(st.sampled_from(sorted(several.prompts)))
            if several.scheduler.abort(serial):
                aborted.add(serial)
    several.run()
    several.check(*aborted)
    for serial in aborted:
        assert serial not in several.ended
