"""When the load of experts is looked at, and what is made of it."""

from __future__ import annotations

import pytest

from sapwood_worker.core.expert_balancing import ExpertWatch
from sapwood_worker.records.expert_load import ExpertLoad, expert_load


def test_balance_is_the_mean_of_the_layers():
    load = expert_load([[4, 4, 4], [6, 0, 3]])
    assert load.tokens == (10, 4, 7)
    assert load.balance == pytest.approx((1 + 0.5) / 2)


def test_layers_without_tokens_do_not_count():
    assert expert_load([[0, 0], [1, 1]]) == ExpertLoad((1, 1), 1.0)
    assert expert_load([[0, 0]]) == ExpertLoad((0, 0), 0.0)


def test_expert_counts_are_asked_for_each_second_and_read_a_turn_later():
    now, counts, asked = [100.0], [[0, 0]], []

    def ask():
        asked.append(now[0])
        return lambda found=[list(layer) for layer in counts]: found

    watch = ExpertWatch(ask, lambda: now[0])
    assert watch.take(idle=False) is None
    assert watch.take(idle=False) == ExpertLoad((0, 0))
    counts[0][1] += 5
    now[0] = 100.5
    assert watch.take(idle=False) is None
    assert watch.take(idle=True) == ExpertLoad((0, 5), 0.5)
    assert watch.take(idle=True) is None, "nothing new"
    counts[0][0] += 5
    now[0] = 100.9
    assert watch.take(idle=False) is None
    now[0] = 101.0
    assert watch.take(idle=False) is None
    counts[0][0] += 5
    assert watch.take(idle=False) == ExpertLoad((5, 5), 1.0), "as it was when it was asked for"
    now[0] = 102.0
    assert watch.take(idle=False) is None
    counts[0][1] += 5
    assert watch.take(idle=True) == ExpertLoad((10, 10), 1.0), "not what was asked for before"
    assert asked == [100.0, 100.5, 100.5, 101.0, 102.0, 102.0]
