"""What goes to which rank beyond how much there is to do: pages that are read for a request wait where it will be."""

from __future__ import annotations

from array import array
from collections import defaultdict
from typing import Any

import pytest

from sapwood_common.contract.sampling import SamplingParams
from sapwood_worker.core.scheduler import rank_planner as planner_module
from sapwood_worker.core.scheduler.config import SchedulerConfig
from sapwood_worker.core.scheduler.rank_planner import RankPlanner
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.results import Handoffs
from sapwood_worker.core.scheduler.scheduler import Scheduler
from sapwood_worker.records.handoff import HandoffTicket

CONFIG = SchedulerConfig(page_size=16, num_pages=64, context_length=256, max_running=2, max_step_tokens=64)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[Handoffs, list[bytes]]:
    """The transfers whose pages each scheduler was to read."""
    noted: dict[Handoffs, list[bytes]] = defaultdict(list)

    def note(self: Handoffs, ticket: HandoffTicket, prompt: array[int], namespace: bytes) -> None:
        noted[self].append(ticket.transfer_id)

    monkeypatch.setattr(Handoffs, "announced", note)
    return noted


def ticket(name: bytes) -> HandoffTicket:
    return HandoffTicket(name, ":1", 0, b"", [], [], 1500)


def request(serial: int, **fields: Any) -> Request:
    return Request(serial, f"r{serial}", array("I", range(3, 103)), SamplingParams(), **fields)


def requests_of(planner: RankPlanner) -> list[int]:
    return [each.requests for each in planner.load().ranks]


def test_a_request_comes_to_the_rank_that_reads_its_pages(told: dict[Handoffs, list[bytes]]) -> None:
    ranks = [Scheduler(CONFIG), Scheduler(CONFIG)]
    planner = RankPlanner(CONFIG, ranks)
    planner.add(request(0))
    assert requests_of(planner) == [1, 0]
    prompt = array("I", range(3, 103))
    planner.handoffs.announced(ticket(b"a"), prompt, b"")
    planner.handoffs.announced(ticket(b"a"), array("I"), b"")
    assert [told[each.handoffs] for each in ranks] == [[], [b"a", b"a"]]
    for serial in range(1, 4):  # now the other rank has less to do
        ranks[1].add(request(serial))
    planner.add(request(4, ticket=ticket(b"a")))
    assert requests_of(planner) == [1, 1]
    planner.add(request(5, ticket=ticket(b"b")))
    assert requests_of(planner) == [2, 1]
    planner.schedule()
    assert requests_of(planner) == [2, 1], "a request stays where its pages are"


def test_of_requests_that_are_likely_to_come_only_the_latest_are_remembered(
    monkeypatch: pytest.MonkeyPatch, told: dict[Handoffs, list[bytes]]
) -> None:
    monkeypatch.setattr(planner_module, "_MOST_PROMISED", 2)
    ranks = [Scheduler(CONFIG), Scheduler(CONFIG)]
    planner = RankPlanner(CONFIG, ranks)
    for name in (b"a", b"b", b"c"):
        planner.handoffs.announced(ticket(name), array("I", [5] * 40), b"")
    for name in (b"a", b"b", b"c"):
        planner.handoffs.announced(ticket(name), array("I"), b"")
    assert [told[each.handoffs] for each in ranks] == [[b"a", b"b", b"c", b"b", b"c"], []]
