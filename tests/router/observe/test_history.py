"""The last hour: rates from counters, events from changes, bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sapwood_router.observe.history import COLUMNS, MOST_SAMPLES, History
from sapwood_router.observe.status import RouterState, WorkerState
from sapwood_router.routing.worker_view import Load

WORKER = WorkerState("w:1", "m", "up", False, "", "closed", 1, 0, Load(num_pages=100, epoch=1), 5.0)


class Fleet:
    def __init__(self) -> None:
        self.now, self.resumptions = 1000.0, 0
        self.workers = {"w:1": WORKER}
        self.history = History(self.state, lambda: self.now)

    def state(self) -> RouterState:
        return RouterState(1.0, 0, 2, self.resumptions, "", "p", tuple(self.workers.values()))

    def sample(self, **load: int) -> dict[str, dict[str, float | None]]:
        self.now += 10
        self.workers["w:1"] = replace(WORKER, load=Load(**{"num_pages": 100, "epoch": 1, **load}))
        before = self.history.since(0).next
        self.history.sample()
        (new,) = self.history.since(before).samples
        return {name: dict(zip(COLUMNS, row, strict=True)) for name, row in (("", new.together), *new.workers.items())}


def test_rates_are_the_growth_of_counters_and_a_restarted_worker_counts_from_zero() -> None:
    fleet = Fleet()
    assert fleet.sample()["w:1"]["hit_rate"] is None
    one = fleet.sample(prompt_tokens=200, cached_tokens=50, device_hit_tokens=40, host_hit_tokens=10, used_pages=25)
    assert one["w:1"]["hit_rate"] == 0.25
    assert (one["w:1"]["device_hits_per_second"], one["w:1"]["host_hits_per_second"]) == (4.0, 1.0)
    assert (one["w:1"]["cache_used"], one["w:1"]["host_used"]) == (0.25, None)
    assert (one[""]["waiting"], one["w:1"]["waiting"]) == (2.0, 0.0)
    again = fleet.sample(prompt_tokens=100, cached_tokens=100, epoch=2)
    assert again["w:1"]["hit_rate"] == 1.0


def test_times_are_means_of_the_requests_that_ended_in_the_sample() -> None:
    fleet = Fleet()
    fleet.history.ended("w:1", 0.1, 0.01)
    fleet.history.ended("w:1", 0.3, None)
    fleet.history.ended("w:2", 0.5, 0.03)
    told = fleet.sample()
    assert told["w:1"]["first_token_ms"] == pytest.approx(200)
    assert told["w:1"]["token_ms"] == pytest.approx(10)
    assert told[""]["first_token_ms"] == pytest.approx(300)
    assert told[""]["token_ms"] == pytest.approx(20)
    assert fleet.sample()["w:1"]["first_token_ms"] is None


def test_each_change_of_a_worker_is_one_event() -> None:
    fleet = Fleet()
    fleet.history.look()
    fleet.history.look()
    fleet.workers["w:1"] = replace(WORKER, state="down", problem="it fell")
    fleet.history.look()
    fleet.workers["w:1"] = replace(WORKER, weights="v1")
    fleet.history.look()
    fleet.workers["w:1"] = replace(WORKER, weights="v2")
    fleet.resumptions = 3
    fleet.history.look()
    fleet.workers.clear()
    fleet.history.look()
    events = [(event.kind, event.text) for event in fleet.history.since(0).events]
    resumed = "3 streams continued on another worker"
    assert events == [
        ("up", ""),
        ("down", "it fell"),
        ("up", ""),
        ("weights", "v2"),
        ("resumed", resumed),
        ("removed", ""),
    ]


def test_an_hour_is_kept_and_a_reader_gets_what_is_new_to_it() -> None:
    fleet = Fleet()
    for _ in range(MOST_SAMPLES + 5):
        fleet.sample()
    whole = fleet.history.since(0)
    assert len(whole.samples) == MOST_SAMPLES
    fleet.sample()
    assert len(fleet.history.since(whole.next).samples) == 1
