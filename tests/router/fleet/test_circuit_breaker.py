"""When a breaker opens, whom it lets through, and what it ignores."""

import pytest

from sapwood_common import errors
from sapwood_router.fleet.circuit_breaker import (
    BreakerSettings,
    BreakerState,
    CircuitBreaker,
    Outcome,
    WorkerLostError,
    outcome_of,
)
from sapwood_testing.clock import Clock

SETTINGS = BreakerSettings(
    consecutive=3, failure_rate=0.5, least_requests=10, window=10.0, open_seconds=1.0, most_open_seconds=4.0
)
OPEN, HALF_OPEN, CLOSED = BreakerState.OPEN, BreakerState.HALF_OPEN, BreakerState.CLOSED


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock) -> CircuitBreaker:
    return CircuitBreaker(SETTINGS, clock)


def go(breaker: CircuitBreaker, *outcomes: Outcome) -> None:
    for outcome in outcomes:
        breaker.begin().end(outcome)


FAULT, SUCCESS, BUSY, NEUTRAL = Outcome.SERVER_FAULT, Outcome.SUCCESS, Outcome.BUSY, Outcome.NEUTRAL


def test_faults_in_a_row_open_it_and_a_success_between_does_not_let_them_add_up(breaker) -> None:
    go(breaker, FAULT, FAULT, SUCCESS, FAULT, FAULT)
    assert breaker.state is CLOSED
    go(breaker, FAULT)
    assert breaker.state is OPEN
    assert not breaker.admits()


def test_what_is_not_the_servers_fault_never_opens_it(breaker) -> None:
    go(breaker, *[BUSY, NEUTRAL] * 100)
    go(breaker, FAULT, NEUTRAL, FAULT, BUSY)
    assert breaker.state is CLOSED


def test_a_share_of_faults_opens_it_once_there_are_enough_requests(breaker) -> None:
    go(breaker, *[FAULT, SUCCESS] * 4, SUCCESS)
    assert breaker.state is CLOSED
    go(breaker, FAULT)
    assert breaker.state is OPEN


def test_faults_of_long_ago_do_not_count(breaker, clock) -> None:
    go(breaker, *[FAULT, SUCCESS] * 4)
    clock.now = 11.0
    go(breaker, *[SUCCESS] * 2, FAULT, SUCCESS)
    assert breaker.state is CLOSED


def test_half_open_admits_exactly_one_probe_whose_success_closes_it(breaker, clock) -> None:
    go(breaker, FAULT, FAULT, FAULT)
    clock.now = 0.99
    assert not breaker.admits()
    clock.now = 1.0
    assert breaker.state is HALF_OPEN
    probe = breaker.begin()
    assert probe.is_probe
    assert not breaker.admits()
    probe.end(SUCCESS)
    assert breaker.state is CLOSED
    assert breaker.admits()


def test_a_failed_probe_opens_it_for_twice_as_long_up_to_a_bound(breaker, clock) -> None:
    go(breaker, FAULT, FAULT, FAULT)
    for seconds in (1.0, 2.0, 4.0, 4.0):
        clock.now += seconds - 0.01
        assert not breaker.admits()
        clock.now += 0.01
        go(breaker, FAULT)
        assert breaker.state is OPEN
    clock.now += 4.0
    go(breaker, SUCCESS, FAULT, FAULT, FAULT)
    clock.now += 1.0
    assert breaker.admits()  # the time begins again after a success


def test_a_probe_that_says_nothing_gives_its_place_to_the_next(breaker, clock) -> None:
    go(breaker, FAULT, FAULT, FAULT)
    clock.now = 1.0
    breaker.begin().end(NEUTRAL)
    assert breaker.state is HALF_OPEN
    assert breaker.begin().is_probe


def test_requests_begun_before_it_opened_neither_close_nor_reopen_it(breaker, clock) -> None:
    early = [breaker.begin() for _ in range(2)]
    go(breaker, FAULT, FAULT, FAULT)
    early[0].end(SUCCESS)
    assert breaker.state is OPEN
    clock.now = 1.0
    probe = breaker.begin()
    early[1].end(FAULT)
    assert breaker.state is HALF_OPEN
    probe.end(SUCCESS)
    assert breaker.state is CLOSED


def test_a_fault_after_the_first_token_counts_once(breaker) -> None:
    for _ in range(3):
        permit = breaker.begin()
        permit.end(SUCCESS)
        permit.end(FAULT)
        permit.end(FAULT)
    assert breaker.state is CLOSED  # each was preceded by a success
    for _ in range(2):
        breaker.fault()
    assert breaker.state is OPEN


def test_a_new_worker_behind_the_address_starts_clean(breaker, clock) -> None:
    go(breaker, FAULT, FAULT, FAULT)
    breaker.reset()
    assert breaker.state is CLOSED
    go(breaker, FAULT, FAULT)
    assert breaker.state is CLOSED


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (errors.UnavailableError("x"), FAULT),
        (errors.InternalError("x"), FAULT),
        (errors.ResourceExhaustedError("x"), BUSY),
        (errors.InvalidArgumentError("x"), NEUTRAL),
        (errors.RequestCancelledError("x"), NEUTRAL),
        (errors.DeadlineExceededError("x"), NEUTRAL),
        (WorkerLostError("x"), NEUTRAL),
    ],
)
def test_only_server_faults_are_held_against_a_worker(error, outcome) -> None:
    assert outcome_of(error) is outcome
