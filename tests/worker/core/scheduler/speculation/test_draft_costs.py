"""What drafts take that have to be computed: the first, cold one is not trusted, and lengths tell of each other."""

from __future__ import annotations

import pytest

from sapwood_worker.core.scheduler.speculation.costs import DraftCosts


def noted(*lengths: tuple[int, float]) -> DraftCosts:
    costs = DraftCosts()
    for longest, seconds in lengths:
        for _ in range(3):
            costs.note(1, longest, seconds)
    return costs


def test_a_first_draft_that_compiles_says_nothing() -> None:
    costs = DraftCosts()
    costs.note(1, 1, 0.020)
    assert costs.of(1, 1) is None
    costs.note(1, 1, 0.001)
    assert costs.of(1, 1) == 0.001
    costs.note(1, 1, 0.9)  # the machine did something else
    assert costs.of(1, 1) == pytest.approx(0.0012)
    assert costs.of(2, 1) is None


def test_lengths_that_were_not_tried_are_expected_by_those_that_were() -> None:
    assert noted((1, 1.0)).of(1, 3) == pytest.approx(2.0)
    costs = noted((1, 1.0), (3, 1.4))
    assert costs.of(1, 2) == pytest.approx(1.2)
    assert costs.of(1, 5) == pytest.approx(1.8)
    assert noted((4, 2.0)).of(1, 2) == pytest.approx(1.5)
