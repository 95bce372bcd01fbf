"""The next change of a placement, against brute force over all changes that take something from the busiest rank."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sapwood_worker.core.expert_balancing import LEAST_GAIN, Change, balance, next_change, rank_loads


@st.composite
def states(draw):
    """Loads of experts, where they are, and how many a rank can have."""
    ranks = draw(st.integers(2, 4))
    each = draw(st.integers(1, 3))
    experts, room = ranks * each, each + draw(st.integers(0, 2))
    loads = np.array(draw(st.lists(st.integers(0, 50), min_size=experts, max_size=experts)), float)
    places = np.zeros((experts, ranks), bool)
    places[np.arange(experts), np.arange(experts) // each] = True
    for expert, rank in draw(st.lists(st.tuples(st.integers(0, experts - 1), st.integers(0, ranks - 1)), max_size=8)):
        if places[:, rank].sum() < room:
            places[expert, rank] = True
    return loads, places, room


def norm(loads, places):
    """Sixteenth powers of what ranks have, in units of their mean, by sums over lists."""
    ranks = range(places.shape[1])
    own = [sum(loads[e] / places[e].sum() for e in np.flatnonzero(places[:, rank])) for rank in ranks]
    return sum((each / (sum(own) / len(own))) ** 16 for each in own)


def changes(places, busy):
    """All that copy one expert from a rank, move it, give it up or let it change places, legal or not."""
    ranks = places.shape[1]
    for expert in np.flatnonzero(places[:, busy]):
        yield Change(drops=((expert, busy),))
        for rank, keeps in product(set(range(ranks)) - {busy}, (True, False)):
            if places[expert, rank]:
                continue
            left = () if keeps else ((expert, busy),)
            yield Change(((expert, rank),), left)
            for other in np.flatnonzero(places[:, rank]):
                yield Change(((expert, rank),), (*left, (other, rank)))
                if not places[other, busy]:
                    yield Change(((expert, rank), (other, busy)), (*left, (other, rank)))


def legal(places, room):
    return places.any(1).all() and (places.sum(0) <= room).all()


@settings(max_examples=60, deadline=None)
@given(states())
def test_no_single_change_is_better(state):
    loads, places, room = state
    if not loads.any():
        assert next_change(loads, places, room) is None
        return
    busy = int(rank_loads(loads, places).argmax())
    possible = [after for each in changes(places, busy) if legal(after := each.made(places), room)]
    best = min((norm(loads, after) for after in possible), default=np.inf)
    found = next_change(loads, places, room)
    if found is None:
        assert best >= norm(loads, places) * (1 - LEAST_GAIN) * (1 - 1e-9)
    else:
        assert legal(found.made(places), room)
        assert norm(loads, found.made(places)) == pytest.approx(best, rel=1e-9)
        assert best < norm(loads, places) * (1 - LEAST_GAIN) * (1 + 1e-9)


def all_places(experts, ranks, room):
    """Every way to have each expert on one rank at least."""
    sets = [each for each in product((False, True), repeat=ranks) if any(each)]
    for chosen in product(sets, repeat=experts):
        places = np.array(chosen)
        if (places.sum(0) <= room).all():
            yield places


def test_change_after_change_ends_near_the_best_of_all_placements():
    random = np.random.default_rng(3)
    ratios, made = [], []
    ways = list(all_places(6, 2, 4))
    for _ in range(40):
        loads = random.lognormal(0, 1, 6).round(2)
        places, count = np.repeat(np.eye(2, dtype=bool), 3, 0), 0
        while (change := next_change(loads, places, 4)) is not None:
            places, count = change.made(places), count + 1
        best = min(rank_loads(loads, each).max() for each in ways)
        ratios.append(rank_loads(loads, places).max() / best)
        made.append(count)
    assert np.mean(ratios) < 1.03 and max(ratios) < 1.2
    assert max(made) <= 6


def test_a_layer_as_large_as_deepseeks_is_even_after_few_changes():
    experts, ranks, room = 256, 8, 36
    loads = np.random.default_rng(0).lognormal(0, 1, experts)
    places = np.repeat(np.eye(ranks, dtype=bool), experts // ranks, 0)
    assert balance(rank_loads(loads, places)) < 0.8
    for _ in range(8):
        change = next_change(loads, places, room)
        places = places if change is None else change.made(places)
    assert balance(rank_loads(loads, places)) > 0.95
    assert legal(places, room)


def test_without_tokens_nothing_changes():
    assert next_change(np.zeros(4), np.repeat(np.eye(2, dtype=bool), 2, 0), 3) is None
