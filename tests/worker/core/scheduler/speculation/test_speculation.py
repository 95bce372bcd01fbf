"""How much is drafted: by each request's own rate, by what steps cost, within pages, stop tokens and length; nothing in vain."""

from __future__ import annotations

import pytest

from sapwood_common.contract.sampling import SamplingParams
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.speculation.costs import LADDER, StepCosts
from sapwood_worker.core.scheduler.speculation.drafter import HostDrafter
from sapwood_worker.core.scheduler.speculation.speculation import MOST_DRAFTED, Speculation

SURE = 60
"""Tokens foreseen, after which a rate is almost 1."""


class Row:
    """Foresees what it is told to; ``seen`` is what its next look finds."""

    def __init__(self, seen: tuple[int, int], draft: list[int]) -> None:
        self.seen = seen
        self.draft = draft

    def follow(self) -> tuple[int, int]:
        seen, self.seen = self.seen, (0, 0)
        return seen

    def propose(self, unknown: int, most: int) -> list[int]:
        return self.draft[unknown : unknown + most]


class Drafter(HostDrafter):
    name = "test"

    def __init__(self, rows: list[Row]) -> None:
        self._rows = iter(rows)

    def begin(self, request: Request) -> Row:
        return next(self._rows)


def requests(count: int, **sampling: object) -> list[Request]:
    found = []
    for serial in range(count):
        request = Request(serial, f"r{serial}", list(range(7)), SamplingParams(**({"max_tokens": 100} | sampling)))
        request.token_ids.append(7)
        found.append(request)
    return found


def speculation(rows: list[Row], costs: StepCosts | None = None, positions: int = 64, room: int = 99) -> Speculation:
    return Speculation(Drafter(rows), positions, costs, lambda request, count: min(count, room))


def measured(rows: int, seconds_a_position: float) -> StepCosts:
    """Steps take 1 s, and so much more for each position beyond their requests'."""
    costs = StepCosts()
    for _ in range(10):
        costs.note(rows, rows, 1.0)
    for positions in (rung for rung in LADDER if rung > rows):
        for _ in range(4):
            costs.note(rows, positions, 1.0 + seconds_a_position * (positions - rows))
    for _ in range(4):
        costs.note(rows, rows, 1.0)
    return costs


def test_a_request_drafts_once_its_rate_is_learned_and_stops_when_it_was_wrong() -> None:
    row, (request,) = Row((0, 0), [7] * 40), requests(1)
    planner = speculation([row])
    assert planner.plan([request]) == []
    row.seen = (SURE, 0)
    assert planner.plan([request]) == [[7] * MOST_DRAFTED]
    lengths = []
    for _ in range(12):
        row.seen = (0, 1)
        drafts = planner.plan([request])
        lengths.append(len(drafts[0]) if drafts else 0)
    assert lengths == sorted(lengths, reverse=True) and lengths[0] > 5 and lengths[-1] == 0


def test_a_request_that_says_no_is_never_looked_at() -> None:
    assert speculation([]).plan(requests(3, speculate=False)) == []


@pytest.mark.parametrize(("settings", "expected"), [({"stop_token_ids": (9,)}, 3), ({"max_tokens": 6}, 4)])
def test_nothing_is_drafted_that_cannot_follow(settings: dict[str, object], expected: int) -> None:
    (request,) = requests(1, **settings)
    request.stops = frozenset(request.sampling.stop_token_ids)
    (draft,) = speculation([Row((SURE, 0), [7, 7, 7, 9, 7, 7, 7])]).plan([request])
    assert len(draft) == expected


def test_a_draft_after_a_token_that_is_not_known_yet_begins_one_later() -> None:
    (request,) = requests(1)
    request.unknown = 1
    (draft,) = speculation([Row((SURE, 0), [5, 6, 7, 8])]).plan([request])
    assert draft == [6, 7, 8]


def test_drafts_keep_to_the_pages_and_the_positions_there_are() -> None:
    rows = [Row((SURE, 0), [7] * 40) for _ in range(4)]
    assert [len(draft) for draft in speculation(rows, room=2).plan(requests(4))] == [2] * 4
    rows = [Row((SURE, 0), [7] * 40) for _ in range(4)]
    assert sum(len(draft) for draft in speculation(rows, positions=10).plan(requests(4))) == 6
    assert speculation(rows, room=0).plan(requests(0)) == []
    rows = [Row((SURE, 0), [7] * 40) for _ in range(4)]
    assert speculation(rows, room=0).plan(requests(4)) == []


def test_drafting_waits_for_measured_plain_steps_and_takes_all_free_positions() -> None:
    assert speculation([Row((SURE, 0), [7] * 40)], StepCosts()).plan(requests(1)) == []
    (draft,) = speculation([Row((SURE, 0), [7] * 40)], measured(1, 0.0)).plan(requests(1))
    assert len(draft) == MOST_DRAFTED


def test_nothing_is_drafted_where_a_position_costs_as_much_as_a_step() -> None:
    planner = speculation([], measured(1, 1.0))  # no request is even looked at
    assert planner.plan(requests(1)) == []


def test_the_requests_whose_drafts_are_likeliest_get_the_positions_that_pay() -> None:
    sure, unsure = Row((SURE, 0), [7] * 40), Row((4, 0), [7] * 40)
    planner = speculation([sure, unsure], measured(2, 0.25))
    drafts = planner.plan(requests(2))
    assert len(drafts[0]) > len(drafts[1])


def test_plain_steps_are_measured_again_after_many_with_drafts() -> None:
    row, (request,) = Row((SURE, 0), [7] * 40), requests(1)
    planner = speculation([row], measured(1, 0.0))
    plain = 0
    for _ in range(2000):
        drafts = planner.plan([request])
        plain += not drafts
        planner.measured(1, 1 + sum(map(len, drafts)), 1.0, sum(map(len, drafts)))
    assert 3 <= plain <= 30


def test_steps_during_which_the_clock_stands_still_have_a_duration() -> None:
    costs = StepCosts()
    for _ in range(4):
        costs.note(1, 1, 0.0)
        costs.note(1, 5, 0.0)
        costs.note(1, 5, 0.0)
        costs.note(1, 1, 0.0)
    assert costs.plain(1) is not None
    assert (costs.known(1, 5) or 0) > 0


def test_a_look_takes_a_share_of_a_step_and_goes_on_where_the_last_one_ended() -> None:
    looks: list[int] = []

    class Counted(Row):
        def propose(self, unknown: int, most: int) -> list[int]:
            looks.append(self.draft[0])
            return []

    ticks = iter(range(10_000))
    asked, rows = requests(8), [Counted((0, 0), [place]) for place in range(8)]
    by_serial = {request.serial: row for request, row in zip(asked, rows, strict=True)}
    drafter = Drafter([])
    drafter.begin = lambda request: by_serial[request.serial]  # type: ignore[method-assign]
    planner = Speculation(drafter, 64, measured(8, 0.0), lambda _, count: count, clock=lambda: next(ticks) * 0.1)
    for _ in range(4):
        planner.plan(asked)
    assert looks[:8] == [0, 1, 2, 3, 4, 5, 6, 7] and len(looks) < 12


def test_a_first_step_with_drafts_says_nothing_of_what_the_others_take() -> None:
    costs = StepCosts()
    for seconds in (1.0,) * 4:
        costs.note(4, 4, seconds)
    costs.note(4, 8, 1.1)  # overlapped with the one before
    assert costs.known(4, 8) is None
    costs.note(4, 8, 1.9)
    assert costs.known(4, 8) == 1.9
    costs.note(4, 8, 1.9)
    assert costs.known(4, 8) == pytest.approx(1.9)


def test_what_as_many_positions_take_is_known_if_it_is_of_about_as_many_requests() -> None:
    """A batch that shrinks would else try every size again."""
    costs = StepCosts()
    for rows, seconds in ((16, 1.0), (13, 0.9), (9, 0.8)):
        for _ in range(4):
            costs.note(rows, rows, seconds)
    for _ in range(3):
        costs.note(16, 32, 1.4)
    assert costs.curve(13, 32)[-1] == (32, pytest.approx(1.3), True)
    assert not any(known for _, _, known in [*costs.curve(13, 24), *costs.curve(9, 32)])
    for _ in range(2):
        costs.note(13, 32, 1.2)
    assert costs.curve(13, 32)[-1] == (32, pytest.approx(1.2), True), "its own, once there is any"


def test_what_drafts_cost_other_numbers_of_requests_is_expected_before_it_is_tried() -> None:
    costs = measured(64, 0.01)
    for _ in range(4):
        costs.note(48, 48, 0.9)
    shorter, longer = costs.curve(48, 96)
    assert shorter == (64, 0.9, False)  # drafts of so few tokens were not tried with 64 requests
    assert longer == (96, pytest.approx(0.9 + 0.75 * 0.32 * 48 / 64), False)
    assert costs.curve(64, 96) == [(96, pytest.approx(1.32), True)]
