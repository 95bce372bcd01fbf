"""Drafts never cost more than a small share of the time and bring what is to be had: on a virtual clock, whatever steps cost."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from sapwood_testing.drafts.virtual_worker import VirtualWorker
from sapwood_worker.core.scheduler.speculation.speculation import Planner

WARM_UP, STEPS = 1000, 2500
FEW, MANY = (
    settings(max_examples=4, derandomize=True),
    settings(max_examples=20, derandomize=True, phases=[Phase.generate]),
)

few_rows, rows_of = st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4, 8, 16])
chances = st.sampled_from([0.0, 0.1, 0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0])


@st.composite
def costs(draw: st.DrawFn) -> Callable[[int], Callable[[int], float]]:
    """Seconds of a step by its positions, for so many rows: a step without drafts takes 1, more positions no less."""
    first = draw(st.sampled_from([0.0, 0.05, 0.2, 0.5]))
    slope = draw(st.sampled_from([0.0, 0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0]))
    jump, at = draw(st.sampled_from([0.0, 0.2, 0.6])), draw(st.sampled_from([4, 8, 16, 32]))

    def of(rows: int) -> Callable[[int], float]:
        return lambda count: 1 + (first + slope * (count - rows) + jump * (count > at + rows)) * (count > rows)

    return of


settings_of = st.fixed_dictionaries(
    {
        "depth": st.sampled_from([0.0, 0.0, 0.02, 0.1, 0.3]),
        "switch": st.sampled_from([0.0, 0.1, 0.3]),
        "noise": st.sampled_from([0.0, 0.05, 0.1]),
        "seed": st.integers(0, 10_000),
    }
)


def check_loss(rows: int, right: Callable[[int, int], float], cost: Any, **given_: Any) -> VirtualWorker:
    worker = VirtualWorker(rows, right, cost(rows), positions=max(64, 2 * rows), **given_)
    worker.run(WARM_UP)
    rate = worker.run(STEPS)
    # A step of chance more or less: noise is in both, but only the one with drafts is measured here.
    assert rate >= (0.99 - 0.05 * given_["noise"]) * worker.off()
    return worker


def check_best(rows: int, right: float, cost: Any, **given_: Any) -> None:
    worker = VirtualWorker(rows, lambda row, place: right, cost(rows), positions=max(64, 2 * rows), **given_)
    worker.run(2 * WARM_UP)
    assert worker.run(STEPS) >= 0.95 * worker.best(right)


@FEW
@given(few_rows, chances, costs(), settings_of)
def test_tokens_a_second_are_at_least_99_of_100_without_drafts(
    rows: int, right: float, cost: Any, given_: dict[str, Any]
) -> None:
    check_loss(rows, lambda row, place: right, cost, **given_)


@FEW
@given(few_rows, chances, costs(), settings_of)
def test_tokens_a_second_are_within_5_of_100_of_the_best_fixed_length(
    rows: int, right: float, cost: Any, given_: dict[str, Any]
) -> None:
    check_best(rows, right, cost, **given_)


@pytest.mark.slow
@pytest.mark.timeout(600)
@MANY
@given(rows_of, chances, costs(), settings_of)
def test_more_requests_are_within_5_of_100_of_the_best_fixed_length(
    rows: int, right: float, cost: Any, given_: dict[str, Any]
) -> None:
    check_loss(rows, lambda row, place: right, cost, **given_)


@pytest.mark.slow
@pytest.mark.timeout(600)
@MANY
@given(rows_of, st.sampled_from([3, 10, 60]), st.sampled_from([3, 60, 200]), costs(), settings_of)
def test_texts_foreseen_in_places_are_near_the_best_fixed_length(
    rows: int, runs: int, gaps: int, cost: Any, given_: dict[str, Any]
) -> None:
    check_loss(rows, lambda row, place: float((place + 7 * row) % (runs + gaps) < runs), cost, **given_)


@pytest.mark.slow
@pytest.mark.timeout(600)
@MANY
@given(st.sampled_from([2, 4, 16]), st.lists(chances, min_size=16, max_size=16), costs(), settings_of)
def test_requests_that_differ_are_near_the_best_fixed_length(
    rows: int, right: list[float], cost: Any, given_: dict[str, Any]
) -> None:
    check_loss(rows, lambda row, place: right[row], cost, **given_)


@pytest.mark.slow
@pytest.mark.timeout(600)
@MANY
@given(rows_of, chances, costs(), settings_of)
def test_tokens_a_second_at_more_requests_are_within_5_of_100_of_the_best(
    rows: int, right: float, cost: Any, given_: dict[str, Any]
) -> None:
    check_best(rows, right, cost, **given_)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [32, 64, 256])
@pytest.mark.parametrize(("right", "depth"), [(0.0, 0.1), (0.5, 0.02), (0.3, 0.0)])
def test_tokens_a_second_at_many_requests_are_near_the_best(rows: int, right: float, depth: float) -> None:
    worker = VirtualWorker(
        rows, lambda row, place: right, lambda count: 1 + 0.5 * (count - rows) / rows, depth=depth, positions=2 * rows
    )
    worker.run(300)
    assert worker.run(700) >= 0.99 * worker.off()


@FEW
@given(few_rows, costs(), settings_of)
def test_a_workers_first_steps_lose_no_more_than_the_account_begins_with(
    rows: int, cost: Any, given_: dict[str, Any]
) -> None:
    worker = VirtualWorker(rows, lambda row, place: 0.0, cost(rows), **given_ | {"noise": 0.0})
    assert worker.run(3) == worker.off(), "nothing is drafted before a step's time is known"
    passed, taken, dearest = 3, 3.0, cost(rows)(rows + 3 * rows) + given_["switch"] + 3 * given_["depth"]
    for steps in (3, 4, 10, 20, 60, 200):
        taken += rows * steps / worker.run(steps)
        passed += steps
        assert taken - passed <= 10 + 0.005 * passed + dearest
    assert (worker.drafted > 0) == worker.computes, "who can look on drafts nothing to learn that it is wrong"


@pytest.mark.parametrize("rows", [1, 16])
def test_looking_in_vain_takes_no_more_than_its_share(rows: int) -> None:
    worker = VirtualWorker(rows, lambda row, place: 0.3, lambda count: 1.0 + (count > rows), look=0.2 / rows)
    worker.run(WARM_UP)
    assert 0.99 * worker.off() <= worker.run(STEPS) < worker.off()


@pytest.mark.parametrize("depth", [0.0, 0.07])
def test_steps_that_take_long_only_when_they_are_first_of_their_size_end_no_drafting(depth: float) -> None:
    seen = set()

    def cost(positions: int) -> float:
        first, size = positions not in seen, 1 + 0.2 * (positions > 1) + 0.03 * (positions - 1)
        seen.add(positions)
        return size + 10.0 * (first and positions > 4)  # a kernel that is compiled then

    worker = VirtualWorker(1, lambda row, place: 0.9, cost, depth=depth)
    worker.run(100)
    assert worker.run(200) > (2.0 if depth else 3.0) * worker.off()


def test_what_becomes_right_is_found_and_what_becomes_wrong_is_left(rows: int = 2) -> None:
    right = [0.0]
    worker = VirtualWorker(rows, lambda row, place: right[0], lambda count: 1 + 0.05 * (count - rows), depth=0.05)
    worker.run(3000)
    right[0] = 0.9
    worker.run(3000)
    assert worker.run(500) > 1.5 * worker.off()
    right[0] = 0.0
    assert worker.run(3000) >= 0.98 * worker.off()
    before = worker.drafted
    worker.run(1000)
    assert worker.drafted - before < 30


def test_the_past_of_requests_is_computed_as_far_as_the_account_can_pay() -> None:
    planner = Planner(64, 31)
    for _ in range(10):
        planner.took(1, 1, 0, 1.0)
    assert planner.affords(60) and planner.affords(300) and not planner.affords(3000)
    planner.filled(1, 2, 0.1, 0)
    for _ in range(8):
        planner.filled(1, 2, 0.6, 500)  # a thousandth of a step for each
    assert planner.affords(3000)


def test_a_batch_that_shrinks_tries_no_size_again_that_cannot_pay() -> None:
    planner, tried, lost, before, steps = Planner(256, 31), 0, 0.0, False, 0
    for rows in (each for each in range(250, 4, -1) for _ in range(4)):
        plain, host = 1.9 + 0.0165 * rows, 0.3 + 0.01 * rows  # milliseconds of a 0.6B on a GPU, and of its host
        offers = [(0.9, 1)] * (rows // 3) + [(0.81, 2)] * (rows // 3)
        taken = planner.choose(rows, offers, computes=False)[0] if planner.looks(rows) else 0
        right = round(0.85 * taken)
        seconds = (
            plain + 0.0165 * taken + host * before
        )  # the first one overlaps with the step before it, the one after not
        if taken:
            planner.drafted(right)
            tried += 1
            lost += (plain + 0.0165 * taken + host) / plain - 1 - right / rows
        planner.took(rows, rows + taken, right, seconds)
        before, steps = bool(taken), steps + 1
    assert tried > 50
    assert lost < 0.003 * steps


@pytest.mark.parametrize("cold", [0.0, 20.0])
def test_a_first_draft_of_its_length_that_compiles_ends_no_drafting(cold: float) -> None:
    planner, draw, rate = Planner(32, 31), random.Random(1), 0.7
    seen: set[int] = set()
    plain, brought, passed = 4.2, 0, 0.0  # milliseconds of an 8B on an H200, with a head
    for _ in range(400):
        drafted = 0
        if planner.looks(1):
            taken, _, longest = planner.choose(1, [(rate**place, place) for place in range(1, 32)], computes=True)
            drafted = min(taken, longest)
        if not drafted:
            planner.took(1, 1, 0, plain)
            brought, passed = brought + 1, passed + plain
            continue
        made = 0.75 + 0.36 * drafted + cold * (drafted not in seen)
        seen.add(drafted)
        planner.filled(1, drafted, made, 0)
        planner.drafted(sum(rate**place for place in range(1, drafted + 1)))
        right = next((place for place in range(drafted) if draw.random() > 0.8), drafted)
        rate = (1 - (1 - rate) * 0.95**right) * (0.95 if right < drafted else 1.0)
        planner.took(1, 1 + drafted, right, made + 5.4)
        brought, passed = brought + 1 + right, passed + made + 5.4
    assert brought / passed > 1.6 / plain


@pytest.mark.parametrize("seed", range(4))
def test_a_right_head_pays_from_its_first_seconds_and_a_wrong_one_costs_little(seed: int) -> None:
    """By what an 8B takes on an H200: a check of a draft a quarter longer, a drafted token a fifteenth of a step."""
    good, useless = (
        VirtualWorker(
            1, lambda row, place, right=right: right, lambda count: 1 + 0.3 * (count > 1), depth=0.066, seed=seed
        )  # type: ignore[misc]
        for right in (0.8, 0.0)
    )
    assert good.run(80) > 1.7 * good.off()
    assert good.run(600) > 0.93 * good.best(0.8)
    assert useless.run(200) > 0.98 * useless.off()
    assert useless.run(200) > 0.995 * useless.off()
