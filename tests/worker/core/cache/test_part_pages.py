"""Requests begin with the tokens that they share with a cached page, not only with whole pages."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sapwood_common.contract.page_hash import cache_namespace
from sapwood_common.contract.sampling import SamplingParams
from sapwood_testing.worker.fake_runner import FakeRunner, continuation
from sapwood_worker.core.scheduler.config import SchedulerConfig
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.scheduler import Scheduler
from sapwood_worker.records.kv_layout import StateSlots, WindowGroup
from sapwood_worker.records.model_info import ModelInfo
from sapwood_worker.records.step import Step

VOCAB = 60


class Asking:
    """A scheduler over a runner whose tokens depend on every cached token."""

    def __init__(self, page_size: int = 16, num_pages: int = 64, **settings: object) -> None:
        self.config = SchedulerConfig(
            **({"page_size": page_size, "num_pages": num_pages, "context_length": 512} | settings)  # type: ignore[arg-type]
        )
        self.scheduler = Scheduler(self.config)
        self.runner = FakeRunner(
            ModelInfo(
                architecture="fake",
                dtype="none",
                context_length=512,
                vocab_size=VOCAB,
                eos_token_ids=(),
                page_size=page_size,
                num_pages=num_pages,
                windows=self.config.windows,
                states=self.config.states,
            )
        )
        self.serial = 0
        self.steps: list[Step] = []
        self.cached: dict[int, int] = {}
        self.answers: dict[int, list[int]] = {}
        self.expected: dict[int, list[int]] = {}

    def add(self, prompt: list[int], max_tokens: int = 4, namespace: bytes = b"") -> int:
        sampling = SamplingParams(seed=self.serial, max_tokens=max_tokens)
        self.scheduler.add(Request(self.serial, f"r{self.serial}", prompt, sampling, namespace))
        self.answers[self.serial] = []
        self.expected[self.serial] = [
            token for token, _ in zip(continuation(prompt, sampling, VOCAB), range(max_tokens), strict=False)
        ]
        self.serial += 1
        return self.serial - 1

    def step(self) -> None:
        planned = self.scheduler.schedule()
        self.steps.append(planned)
        for output in self.scheduler.update(self.runner.execute(planned)):
            self.answers[output.serial] += output.token_ids
            self.cached[output.serial] = output.cached_tokens
        self.scheduler.check()

    def run(self) -> None:
        while self.scheduler.has_work:
            self.step()
        assert self.answers == self.expected

    def ask(self, prompt: list[int], max_tokens: int = 4, namespace: bytes = b"") -> int:
        """Answers a prompt; returns how many of its tokens were cached."""
        serial = self.add(prompt, max_tokens, namespace)
        self.run()
        return self.cached[serial]


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=40)


@settings(max_examples=100, deadline=None)
@given(
    prompts=st.lists(st.tuples(tokens, st.integers(1, 9), st.booleans()), max_size=12),
    page_size=st.sampled_from([1, 2, 4, 16]),
)
def test_a_match_is_the_longest_common_beginning_with_all_cached_sequences(
    prompts: list[tuple[list[int], int, bool]], page_size: int
) -> None:
    asking = Asking(page_size, 16 * 64 // page_size)
    cached: list[tuple[bytes, list[int]]] = []
    parts = 0
    for prompt, count, salted in prompts:
        namespace = cache_namespace("salt") if salted else b""
        common = [
            next(
                (at for at, (a, b) in enumerate(zip(prompt[:-1], other, strict=False)) if a != b),
                min(len(prompt) - 1, len(other)),
            )
            for where, other in cached
            if where == namespace
        ]
        found = asking.ask(prompt, count, namespace)
        assert found == max(common, default=0)
        parts += found % page_size
        cached.append((namespace, [*prompt, *asking.answers[asking.serial - 1]][:-1]))  # the last token is not computed
    assert asking.scheduler.load().part_page_tokens == parts


@pytest.mark.parametrize("reach", [0, 3, 16, 40])
def test_a_page_is_copied_in_every_window_too(reach: int) -> None:
    asking = Asking(windows=(WindowGroup(reach, 24), WindowGroup(7, 20)))
    first = list(range(3, 45))
    asking.ask(first)
    assert asking.ask([*first[:38], 1, 1, 1]) == 38
    assert asking.ask([*first, *asking.answers[0], 2, 2]) == 45
    assert asking.scheduler.load().part_page_tokens == 6 + 13


def test_the_page_that_a_running_request_writes_is_shared_as_far_as_it_is_computed() -> None:
    asking = Asking()
    first = asking.add(list(range(3, 23)), 40)
    asking.step()
    asking.step()
    second = asking.add([*range(3, 23), *asking.answers[first][:2], 1], 30)
    asking.run()
    assert asking.cached[second] == 20, "the prompt is, what is decoded since is not"
    third = asking.add([*range(3, 23), *asking.answers[first][:30], 1])
    asking.run()
    assert asking.cached[third] == 50


def test_a_failed_step_leaves_no_page_that_was_to_be_copied_and_was_not() -> None:
    asking = Asking(max_step_tokens=8)
    asking.ask(list(range(3, 23)), 1)
    serial = asking.add([*range(3, 20), 1, 1], 4)
    assert len(asking.scheduler.schedule().page_copies) == 1
    [failed] = asking.scheduler.fail_step("the device is gone")
    assert failed.serial == serial and failed.finish_reason == "error"
    asking.scheduler.check()
    assert asking.scheduler.cached_tokens(Request(9, "next", [*range(3, 20), 1, 1, 1], SamplingParams())) == 17
    del asking.expected[serial], asking.answers[serial]
    assert asking.ask([*range(3, 20), 1, 1, 1]) == 17


def test_a_request_that_fills_the_pool_begins_without_the_copy() -> None:
    asking = Asking(num_pages=4)
    asking.ask(list(range(3, 50)), 1)
    other = [*range(3, 9), *(1 for _ in range(57))]
    assert asking.ask(other, 1) == 0, "the page with these tokens is needed itself"
    assert asking.ask(other[:40], 1) == 39


def test_a_request_that_was_sent_back_goes_on_with_the_part_of_its_page() -> None:
    asking = Asking()
    serial = asking.add(list(range(3, 23)), 20)
    for _ in range(6):
        asking.step()
    asking.scheduler.pause(retract=True)
    asking.scheduler.resume()
    asking.run()
    assert asking.scheduler.load().part_page_tokens == 9, "25 tokens were computed"
    assert len(asking.answers[serial]) == 20


def test_models_with_states_share_pages_only() -> None:
    asking = Asking(states=StateSlots(8))
    asking.ask(list(range(3, 45)))
    assert asking.ask(list(range(3, 45))) % 16 == 0
    assert not any(len(step.page_copies) for step in asking.steps)


def test_of_many_continuations_the_nearest_is_found() -> None:
    asking = Asking(num_pages=4096, max_running=64)
    chance = random.Random(1)
    beginning = [chance.randrange(VOCAB) for _ in range(24)]
    ends = [[chance.randrange(VOCAB) for _ in range(chance.randrange(1, 14))] for _ in range(300)]
    for end in ends:
        asking.ask(beginning + end, 1)
    for end in chance.sample(ends, 40):
        cut = chance.randrange(len(end))
        common = max(
            next((at for at, (a, b) in enumerate(zip(end[:cut], other, strict=False)) if a != b), min(cut, len(other)))
            for other in ends
        )
        prompt = beginning + end[:cut] + [VOCAB]  # no text has this token
        assert asking.scheduler.cached_tokens(Request(9999, "asked", prompt, SamplingParams())) == 24 + common
