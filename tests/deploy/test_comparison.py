"""How benchmarks compare rates of two ways: a textbook's figures, and a signed-rank test done by hand."""

from __future__ import annotations

import importlib.util
import math
import random
from pathlib import Path
from typing import Any

import pytest

_FILE = Path(__file__).parents[2] / "benchmarks" / "gpu" / "serving_load" / "comparison.py"
# Table 3.1 of Hollander and Wolfe, Nonparametric Statistical Methods (1999): scores before and after a tranquiliser.
_BEFORE = (1.83, 0.50, 1.62, 2.48, 1.68, 1.88, 1.55, 3.06, 1.30)
_AFTER = (0.878, 0.647, 0.598, 2.05, 1.06, 1.29, 1.06, 3.14, 1.29)


@pytest.fixture(scope="module")
def comparison() -> Any:
    spec = importlib.util.spec_from_file_location("comparison", _FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rank_sum(differences: list[float]) -> int:
    """Wilcoxon's statistic: the sum of the ranks, by size, of the positive differences; no two are equally large."""
    order = sorted(differences, key=abs)
    return sum(rank for rank, each in enumerate(order, start=1) if each > 0)


def test_a_textbooks_estimate_and_bounds_are_found(comparison: Any) -> None:
    found = comparison.compare(
        [(math.exp(after), math.exp(before)) for after, before in zip(_AFTER, _BEFORE, strict=True)]
    )
    ratio, low, high, count = found
    assert [round(math.log(each), 3) for each in (ratio, low, high)] == [-0.46, -0.786, -0.01]
    assert count == 9


@pytest.mark.parametrize("count", [6, 7, 13, 30])
def test_between_the_bounds_is_what_the_signed_rank_test_does_not_refuse(comparison: Any, count: int) -> None:
    numbers = random.Random(count)
    pairs = [(numbers.lognormvariate(0.3, 0.2), numbers.lognormvariate(0.0, 0.2)) for _ in range(count)]
    found = comparison.compare(pairs)
    mean = count * (count + 1) / 4
    most = mean - 1.96 * math.sqrt(count * (count + 1) * (2 * count + 1) / 24)

    def refused(ratio: float) -> bool:
        below = rank_sum([math.log(ratio) - math.log(first / second) for first, second in pairs])
        return min(below, 2 * mean - below) <= most

    small = 1e-9
    assert refused(found.low * (1 - small)) and not refused(found.low * (1 + small))
    assert refused(found.high * (1 + small)) and not refused(found.high * (1 - small))
    assert found.low < found.ratio < found.high


def test_of_few_pairs_the_bounds_are_the_least_and_the_most_seen(comparison: Any) -> None:
    assert comparison.compare([(3.0, 2.0)]) == pytest.approx((1.5, 1.5, 1.5, 1))
    assert comparison.compare([(1.0, 1.0), (4.0, 1.0)]) == pytest.approx((2.0, 1.0, 4.0, 2)), "the mean of two factors"
    assert comparison.compare([(1.0, 1.0), (2.0, 1.0), (8.0, 2.0)]) == pytest.approx((2.0, 1.0, 4.0, 3))


def test_one_that_stumbles_does_not_move_the_ratio(comparison: Any) -> None:
    found = comparison.compare([(10.0, 10.0)] * 9 + [(1.0, 10.0)])
    assert (found.ratio, found.high) == (1.0, 1.0)


def test_which_comes_first_turns_the_ratio_over(comparison: Any) -> None:
    numbers = random.Random(0)
    pairs = [(numbers.uniform(1, 2), numbers.uniform(1, 2)) for _ in range(12)]
    one, other = comparison.compare(pairs), comparison.compare([(second, first) for first, second in pairs])
    assert (1 / other.ratio, 1 / other.high, 1 / other.low) == pytest.approx((one.ratio, one.low, one.high))


@pytest.mark.parametrize(
    ("pairs", "known"),
    [([(1.0, 1.0)] * 6, True), ([(1.0, 1.0)] * 5, False), ([(1.0, 1.0), (1.2, 1.0)] * 3, False)],
)
def test_a_ratio_is_known_where_its_bounds_are_near_and_pairs_are_six(
    comparison: Any, pairs: list[tuple[float, float]], known: bool
) -> None:
    assert comparison.compare(pairs).known_within(1.02) == known
