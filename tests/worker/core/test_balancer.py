"""Experts move a few at a time, and only where that evens out what ranks have to compute."""

from __future__ import annotations

import numpy as np
import pytest

from sapwood_worker.core.expert_balancing import ExpertBalancer, balance, rank_loads
from sapwood_worker.records.expert_load import ExpertMove, home_slots, moved

SKEWED = [1600, 800, 50, 50, 100, 50, 50, 50]


def settle(balancer):
    """What moves before each step until it is done."""
    steps = []
    while balancer._due:
        steps.append(balancer.take())
    return steps


def test_experts_begin_with_room_behind_those_of_each_rank():
    assert home_slots(4, 2, 2) == [0, 1, -1, 2, 3, -1]
    assert home_slots(4, 2, 0) == [0, 1, 2, 3]


def test_all_moves_of_a_step_happen_at_once():
    swapped = [ExpertMove(0, 0, 2), ExpertMove(0, 2, 0), ExpertMove(0, 1, -1)]
    assert moved([7, 8, 9], swapped) == [9, -1, 7]


def test_skewed_layers_become_even_and_every_expert_stays_somewhere():
    balancer = ExpertBalancer(4, 4)
    balancer.see([SKEWED, SKEWED[::-1], [400] * 8])
    before = balancer.rank_balance
    slots = [list(layer) for layer in balancer.slots]
    copied = 0
    for moves in settle(balancer):
        assert len({move.layer for move in moves}) <= 1 and len(moves) <= 4
        for layer in range(3):
            slots[layer] = moved(slots[layer], [move for move in moves if move.layer == layer])
            ranks = [slots[layer][start : start + 3] for start in range(0, 12, 3)]
            assert all(sum(each >= 0 for each in rank) == len({*rank} - {-1}) for rank in ranks), "twice on a rank"
            assert {*slots[layer]} - {-1} == {*range(8)}
        copied += sum(move.source >= 0 for move in moves)
    assert slots == balancer.slots
    assert slots[2] == home_slots(8, 4, 4), "it was even"
    assert 0 < copied == balancer.moves
    assert before < 0.75 < 0.9 < balancer.rank_balance


def test_no_rank_gives_or_gets_more_than_one_expert_before_a_step():
    loads = (np.random.default_rng(0).lognormal(0, 1, (4, 256)) * 1000).round()
    balancer, room, most = ExpertBalancer(8, 32), 36, 0
    balancer.see(loads.tolist())
    for moves in settle(balancer):
        ways = [(move.source // room, move.slot // room) for move in moves if move.source >= 0]
        assert all(len(side) == len(set(side)) for side in zip(*ways, strict=True))
        most = max(most, len(ways))
    assert most == 2, "some swap"


def test_without_redundant_slots_nothing_moves_and_balance_is_told():
    balancer = ExpertBalancer(2, 0)
    balancer.see([[300, 100, 100, 100]])
    assert not balancer.take() and not balancer.moves
    assert balancer.rank_balance == pytest.approx(300 / 400)


def test_few_tokens_move_nothing():
    balancer = ExpertBalancer(2, 2)
    balancer.see([[60, 0, 0, 0]])
    assert not balancer.take()
    balancer.see([[600, 300, 0, 0]])
    assert balancer.take()


def test_what_was_long_ago_counts_less():
    loads = (np.random.default_rng(0).lognormal(0, 1, 64) * 1000).round()
    balancer, total, seen = ExpertBalancer(4, 8), np.zeros(64), []
    for now in [loads] + [loads[::-1]] * 6:
        total = total + now
        balancer.see([total.tolist()])
        seen.append(balancer.rank_balance)
        settle(balancer)
    assert min(seen[:2]) < 0.85, "before it has moved"
    assert seen[-1] > 0.95


def next_seconds(redundant):
    """How even 8 ranks are in each second while 128 experts' loads drift, half of them in 34 s; copies a second and layer."""
    random, layers = np.random.default_rng(1), 2
    logs, total = random.normal(0, 1, (layers, 128)), np.zeros((layers, 128))
    balancer, found = ExpertBalancer(8, redundant), []
    for _ in range(60):
        logs = 0.98 * logs + 0.199 * random.normal(0, 1, logs.shape)
        shares = np.exp(logs) / np.exp(logs).sum(1, keepdims=True)
        now = np.stack([random.multinomial(100_000, each) for each in shares])
        for layer in range(layers if balancer.slots else 0):
            places = np.array([[expert in rank for rank in in_ranks(balancer, layer)] for expert in range(128)])
            found.append(balance(rank_loads(now[layer].astype(float), places)))
        total = total + now
        balancer.see(total.tolist())
        settle(balancer)
    return np.mean(found[20:]), balancer.moves / 60 / layers


def in_ranks(balancer, layer):
    slots = balancer.slots[layer]
    room = len(slots) // balancer.ranks
    return [set(slots[start : start + room]) for start in range(0, len(slots), room)]


def test_ranks_stay_even_while_loads_drift():
    left, _ = next_seconds(0)
    moved_, copies = next_seconds(16)
    assert left < 0.72 and moved_ > 0.85
    assert copies < 3
