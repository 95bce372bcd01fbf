"""A step's prompt tokens are as many as keep it short, by how long steps took, on fast and on slow devices."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sapwood_worker.core.scheduler.batch import StepPace

WANTED = 0.25


class Device:
    """Steps take ``fixed`` seconds, ``decode`` for each row and ``prompt`` for each prompt token, and now and then longer."""

    def __init__(self, fixed: float, decode: float, prompt: float, noise: float = 0.0) -> None:
        self.fixed, self.decode, self.prompt, self.noise = fixed, decode, prompt, noise
        self.chance = random.Random(1)

    def seconds(self, decodes: int, prompts: int) -> float:
        exact = self.fixed + self.decode * decodes + self.prompt * prompts
        return exact * (1 + self.noise * self.chance.random())


def run(pace: StepPace, device: Device, decodes: list[int]) -> list[tuple[int, int, float]]:
    """Steps with prompts to compute all the time: decodes, prompt tokens and seconds."""
    steps = []
    for rows in decodes:
        prompts = pace.tokens(rows)
        seconds = device.seconds(rows, prompts)
        pace.took(rows, prompts, seconds)
        steps.append((rows, prompts, seconds))
    return steps


@given(
    fixed=st.floats(0.0, 0.1),
    decode=st.floats(0.0, 0.002),
    prompt=st.floats(1e-6, 0.01),
    rows=st.lists(st.integers(1, 64), min_size=4, max_size=12),
)
def test_steps_with_decodes_last_no_longer_than_wanted(
    fixed: float, decode: float, prompt: float, rows: list[int]
) -> None:
    device = Device(fixed, decode, prompt)
    pace = StepPace(WANTED, 512)
    run(pace, device, [each for each in rows for _ in range(60)])  # learns
    for count, prompts, seconds in run(pace, device, [each for each in rows for _ in range(20)][10:]):
        # Times are known by powers of two of the decodes, with a token of a prompt.
        plain = fixed + decode * 2 ** count.bit_length() + prompt
        least = device.seconds(2 ** count.bit_length(), 16)
        assert seconds <= 1.1 * max(WANTED, 13 * plain, least), f"{prompts} tokens beside {count} decodes"


@pytest.mark.parametrize(
    ("device", "most", "least_tokens"),
    [
        pytest.param(Device(0.0065, 2e-5, 2.6e-5), 8192, 8192, id="8B on a GPU"),
        pytest.param(Device(0.033, 8e-4, 2.2e-3, 0.5), 512, 80, id="demo model on a CPU"),
        pytest.param(Device(10.0, 0.1, 0.01), 512, 512, id="weights read from a disk"),
    ],
)
def test_prompts_get_on_on_any_device(device: Device, most: int, least_tokens: int) -> None:
    pace = StepPace(WANTED, most)
    steps = run(pace, device, [8] * 200)
    assert sum(prompts for _, prompts, _ in steps[100:]) >= 100 * least_tokens * 0.95


@given(longer=st.floats(0.0, 0.02), prompt=st.floats(1e-4, 0.01))
def test_steps_with_scored_tokens_last_no_longer_than_wanted(longer: float, prompt: float) -> None:
    device = Device(0.03, 0.001, prompt)
    pace = StepPace(WANTED, 512)
    run(pace, device, [4] * 100)
    before = pace.tokens(4)
    for number in range(40):
        budget = pace.tokens(4)
        scored = max(1, int(budget / 2 / pace.scored_cost))
        rest = max(0, int(budget - scored * pace.scored_cost))
        seconds = device.seconds(4, scored + rest) + longer * scored
        if number >= 20:
            assert seconds <= 1.15 * max(WANTED, 13 * device.seconds(8, 1), device.seconds(8, 16) + 16 * longer)
        pace.took(4, scored + rest, seconds, scored)
    assert pace.tokens(4) == before, "prompts without such tokens are as before"
    assert pace.scored_cost == pytest.approx(min(16.0, 1 + longer / prompt), rel=0.1, abs=0.1)


def test_a_hiccup_of_the_machine_is_soon_forgotten() -> None:
    device = Device(0.02, 0.0, 0.001)
    pace = StepPace(WANTED, 512)
    run(pace, device, [4] * 50)
    before = pace.tokens(4)
    pace.took(4, before, 60.0)
    assert pace.tokens(4) > before // 3
    run(pace, device, [4] * 20)
    assert abs(pace.tokens(4) - before) < before // 10


def test_a_step_that_computes_nothing_tells_nothing() -> None:
    pace = StepPace(WANTED, 512)
    run(pace, Device(0.02, 0.0, 0.002), [4] * 50)
    before = pace.tokens(0), pace.tokens(4)
    pace.took(0, 0, 3.0)
    assert (pace.tokens(0), pace.tokens(4)) == before


def test_steps_without_decodes_are_longer_and_without_a_limit_all_tokens_go() -> None:
    device = Device(0.02, 0.0, 0.002)
    pace = StepPace(WANTED, 4096)
    run(pace, device, [4] * 50)
    assert pace.tokens(0) > 2 * pace.tokens(4)
    assert pace.tokens(0) * device.prompt < 4 * WANTED
    assert StepPace(0.0, 512).tokens(8) == 512
