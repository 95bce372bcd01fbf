"""How many workers are planned: bounds, patience, and a day's traffic against an oracle that knew it before."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sapwood.scaler.plan import Bounds, Plan
from sapwood_testing.scaled_day import Figures, Fleet, run_days


def day(per_worker: float, fleet: Fleet, peak: float, seed: int = 0) -> tuple[Figures, Plan]:
    plan = Plan(Bounds(per_worker, most=200, start=fleet.start))
    return run_days(plan.look, fleet, peak=peak, seed=seed), plan


def test_a_day_of_a_small_fleet_keeps_the_objective_with_few_more_workers_than_an_oracle() -> None:
    figures, _ = day(32, Fleet(), peak=12)
    assert figures.in_time >= 0.99
    assert figures.ratio <= 1.15
    assert figures.most >= 3 * figures.least, "it follows the day"


@pytest.mark.slow
@pytest.mark.parametrize(("start", "seed"), [(60, 0), (60, 1), (180, 0), (30, 2)])
def test_a_day_of_a_large_fleet_keeps_the_objective_with_few_more_workers_than_an_oracle(start: int, seed: int) -> None:
    figures, _ = day(32, Fleet(start=start), peak=60, seed=seed)
    assert figures.in_time >= 0.99
    assert figures.ratio <= 1.15


def test_workers_that_do_less_than_was_said_are_believed_to_do_less() -> None:
    figures, plan = day(40, Fleet(places=32), peak=12)
    assert plan.believed < 37
    assert figures.in_time >= 0.99, "of the second day"


def test_as_many_workers_as_the_day_has_on_average_do_not_keep_the_objective() -> None:
    figures = run_days(lambda now, requests, workers, in_time: 4, Fleet(), peak=12)
    assert figures.in_time < 0.9, "the simulation can fail"


loads = st.lists(st.floats(0, 1e6), min_size=1, max_size=60)


@settings(max_examples=50, deadline=None)
@given(loads, st.integers(0, 5), st.integers(5, 50), st.lists(st.none() | st.floats(0, 1), min_size=60, max_size=60))
def test_a_plan_stays_within_its_bounds(found: list[float], least: int, most: int, in_time: list[float | None]) -> None:
    plan = Plan(Bounds(8.0, least, most, start=30, patience=60))
    for number, load in enumerate(found):
        wanted = plan.look(15.0 * number, load, 3, in_time[number])
        assert least <= wanted <= most
        assert 0.3 * 8.0 <= plan.believed <= 8.0


def test_a_worker_goes_only_after_patience() -> None:
    plan = Plan(Bounds(10.0, start=15, patience=120))
    for now in range(0, 600, 15):
        before = plan.look(now, 100.0, 12)
    wanted = [plan.look(now, 5.0, before) for now in range(600, 1200, 15)]
    assert wanted[:8] == [before] * 8
    assert wanted[-1] < before
    assert wanted == sorted(wanted, reverse=True)


def test_a_new_plan_keeps_the_workers_that_it_finds_for_a_while() -> None:
    plan = Plan(Bounds(10.0, start=15, patience=120))
    wanted = [plan.look(now, 0.0, 20) for now in range(0, 300, 15)]
    assert wanted[:9] == [20] * 9
    assert wanted[-1] == 1


def test_rising_load_is_planned_for_before_it_is_there() -> None:
    plan = Plan(Bounds(10.0, most=1000, start=300, patience=60))
    for minute in range(60):
        load = 100.0 + 10 * minute
        wanted = plan.look(60.0 * minute, load, 1)
    assert wanted * 10.0 >= load + 10 * 5, "in the five minutes that a worker takes to start"


def test_the_day_before_tells_of_a_jump_that_no_trend_shows() -> None:
    plan = Plan(Bounds(10.0, most=1000, start=600, patience=60))
    for minute in range(3 * 1440):
        busy = 540 <= minute % 1440 < 1020
        wanted = plan.look(60.0 * minute, 800.0 if busy else 100.0, 1)
        if minute == 2 * 1440 + 535:
            break
    assert wanted >= 80, "the day begins in five minutes"
