"""When the load of experts is looked at, and what is made of it."""

from __future__ import annotations

import pytest

from sapwood_worker.core.experts.watch import ExpertWatch
from sapwood_worker.records.experts import ExpertLoad, expert_load


def test_balance_is_the_mean_of_the_layers():
    load = expert_load([[4, 4, 4], [6, 0, 3]])
    assert load.tokens == (10, 4, 7)
    assert load.balance == pytest.approx((1 + 0.5) / 2)


def test_layers_without_tokens_do_not_count():
    assert expert_load([[0, 0], [1, 1]]) == ExpertLoad((1, 1), 1.0)
    assert expert_load([[0, 0]]) == ExpertLoad((0, 0), 0.0)


def test_it_is_looked_at_once_a_second_and_when_there_is_nothing_to_do():
    now, counts, looks = [100.0], [[0, 0]], []

    def read():
        looks.append(now[0])
        return [list(layer) for layer in counts]

    watch = ExpertWatch(read, lambda: now[0])
    assert watch.take(idle=False) == ExpertLoad((0, 0))
    counts[0][1] += 5
    now[0] = 100.5
    assert watch.take(idle=False) is None
    assert watch.take(idle=True) == ExpertLoad((0, 5), 0.5)
    assert watch.take(idle=True) is None, "nothing new"
    counts[0][0] += 5
    now[0] = 101.4
    assert watch.take(idle=False) is None
    now[0] = 101.5
    assert watch.take(idle=False) == ExpertLoad((5, 5), 1.0)
    assert looks == [100.0, 100.5, 100.5, 101.5]
