"""Places of adapters: never more than slots, steady, and even; and the fleet simulation, smaller."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sapwood_router.routing.lora_placement import FEWEST, FORGET, LoraPlacement

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from fleet_sim.adapters import Adapters, simulate


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_no_worker_gets_more_adapters_than_slots_whatever_comes_and_goes(seed: int) -> None:
    chance, clock = random.Random(seed), Clock()
    places = LoraPlacement(clock)
    workers = {f"w{n}": chance.randint(1, 5) for n in range(chance.randint(1, 6))}
    for _ in range(200):
        clock.now += chance.expovariate(1.0)
        if chance.random() < 0.05:
            workers = dict(workers)
            if chance.random() < 0.5 and len(workers) > 1:
                del workers[chance.choice([*workers])]
            else:
                workers[f"w{chance.randrange(9)}"] = chance.randint(1, 5)
        name = f"a{min(chance.randrange(20), chance.randrange(20))}"
        places.asked(name)
        held = places.holders(name, workers)
        assert held and set(held) <= set(workers)
        places.check()
        if chance.random() < 0.02:
            places.forget(name)
    clock.now += FORGET + 1
    places.lapse()
    assert places.names() == []


def test_two_routers_name_the_same_workers_and_a_lost_one_moves_only_its_adapters() -> None:
    workers = {f"10.0.0.{n}:1": 32 for n in range(10)}
    names = [f"a{n}" for n in range(60)]
    first, second = LoraPlacement(lambda: 0.0), LoraPlacement(lambda: 0.0)
    for places, order in ((first, names), (second, names[::-1])):
        for name in order:
            places.asked(name)
            places.holders(name, workers)
    before = {name: [*first.holders(name, workers)] for name in names}
    assert before == {name: second.holders(name, workers) for name in names}
    assert {len(held) for held in before.values()} == {FEWEST}
    lost = "10.0.0.3:1"
    left = {address: slots for address, slots in workers.items() if address != lost}
    for name in names:
        after = first.holders(name, left)
        assert [each for each in before[name] if each != lost] == [each for each in after if each in before[name]]
        assert len(after) == FEWEST and lost not in after


def test_holders_grow_with_an_adapters_share_and_shrink_again() -> None:
    clock = Clock()
    workers = {f"w{n}": 8 for n in range(20)}
    places = LoraPlacement(clock)
    for _ in range(4000):
        clock.now += 0.01
        places.asked("hot")
        places.holders("hot", workers)
        if random.random() < 0.5:
            places.asked("cold")
            places.holders("cold", workers)
    assert len(places.holders("hot", workers)) > len(workers) // 2
    for _ in range(4000):
        clock.now += 0.1
        places.asked("cold")
        places.holders("cold", workers)
    assert len(places.holders("hot", workers)) <= FEWEST + 1
    assert places.per_minute("cold") == pytest.approx(600, rel=0.2)


def test_placed_adapters_are_loaded_rarely_and_workers_are_used_evenly() -> None:
    fleet = Adapters(adapters=150, workers=15, slots=32, rate=150.0)
    placed = simulate(fleet, "placed", 15_000, 8_000)
    loaded = simulate(fleet, "loaded", 15_000, 8_000)
    least = simulate(fleet, "least", 15_000, 8_000)
    assert float(placed["loads_a_request"]) <= 0.02
    assert float(placed["imbalance"]) <= 1.2
    assert float(loaded["imbalance"]) > 2.0, "prefer where loaded makes hot spots"
    assert float(least["loads_a_request"]) > 0.2, "least loaded loads everything everywhere"
