"""Two schedulers hand prompts off to each other's caches, whatever is lost, late, spoilt or killed between them."""

from __future__ import annotations

import pytest

from sapwood_testing.worker.handoff.simulation import run_seeds


def test_loss_delay_and_disorder_between_schedulers_give_no_wrong_token() -> None:
    totals = run_seeds(0, steps=250_000)
    print(totals)
    assert min(totals.values()) > 20, f"too little happened: {totals}"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_is_wrong_after_any_single_turn_either() -> None:
    totals = run_seeds(1_000_000, steps=200_000, sweep=1)
    print(totals)
    assert min(totals.values()) > 15, f"too little happened: {totals}"
