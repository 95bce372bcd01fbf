"""Backoff, budget and failover rules, on a clock of the test's own."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sapwood_common import errors
from sapwood_router.fleet.circuit_breaker import WorkerLeftError, WorkerLostError
from sapwood_router.flow.retry import Failover, RetryBudget, RetryPolicy, RetrySettings
from sapwood_testing.clock import Clock

FAR = 1e9


def policy(clock=None, **settings) -> RetryPolicy:
    return RetryPolicy(RetrySettings(**({"reserve": 1000} | settings)), clock or Clock(), random.Random(1))


def test_delays_are_spread_over_an_interval_that_doubles_up_to_the_cap() -> None:
    retry = policy(base=0.1, cap=0.4, attempts=10)
    for retries, most in ((0, 0.1), (1, 0.2), (2, 0.4), (5, 0.4)):
        delays = [retry.delay(retries, FAR) for _ in range(100)]
        assert all(0 <= delay <= most for delay in delays)
        assert max(delays) > 0.9 * most
        assert min(delays) < 0.1 * most


def test_no_more_tries_than_allowed_and_none_past_the_deadline() -> None:
    clock = Clock()
    retry = policy(clock, attempts=3)
    assert retry.delay(1, FAR) is not None
    assert retry.delay(2, FAR) is None
    clock.now = 5.0
    assert retry.delay(0, 5.0) is None


@given(st.lists(st.one_of(st.just("request"), st.just("retry"), st.floats(0.01, 3.0)), max_size=200))
def test_retries_never_exceed_their_share_of_any_window(steps) -> None:
    clock = Clock()
    settings = RetrySettings(ratio=0.2, reserve=2, window=10.0)
    budget = RetryBudget(settings, clock)
    requests: list[float] = []
    retries: list[float] = []
    for step in steps:
        if step == "request":
            budget.request()
            requests.append(clock.now)
        elif step == "retry":
            if budget.take():
                retries.append(clock.now)
                recent = sum(at > clock.now - 10.0 for at in requests)
                # The window's edge is known to a tenth of it: what lies between 9 and 10 s back may be forgotten.
                assert sum(at > clock.now - 9.0 for at in retries) <= 2 + 0.2 * recent
        else:
            clock.now += step


def test_lost_workers_cost_no_budget_and_are_bounded() -> None:
    failover = Failover(policy(reserve=0), 3)
    for _ in range(3):
        assert failover.after(WorkerLostError("gone"), "a", FAR) == 0.0
    assert failover.after(WorkerLeftError("drained"), "a", FAR) == 0.0
    assert failover.after(WorkerLostError("gone"), "a", FAR) is None
    assert failover.after(WorkerLeftError("drained"), "a", FAR) == 0.0
    assert not failover.refused_by


@pytest.mark.parametrize("kind", [errors.UnavailableError, errors.ResourceExhaustedError])
def test_refusals_are_retried_elsewhere_within_the_budget(kind) -> None:
    failover = Failover(policy(), 3)
    assert failover.after(kind("no"), "a", FAR) is not None
    assert failover.refused_by == {"a"}
    assert Failover(policy(reserve=0), 3).after(kind("no"), "a", FAR) is None


def test_a_second_internal_error_is_the_requests_own() -> None:
    failover = Failover(policy(), 3)
    assert failover.after(errors.InternalError("boom"), "a", FAR) is not None
    assert failover.after(errors.InternalError("boom"), "b", FAR) is None


@pytest.mark.parametrize(
    "kind",
    [
        errors.InvalidArgumentError,
        errors.NotFoundError,
        errors.DeadlineExceededError,
        errors.RequestCancelledError,
        errors.UnimplementedError,
    ],
)
def test_what_another_worker_would_say_too_is_never_retried(kind) -> None:
    assert Failover(policy(), 3).after(kind("no"), "a", FAR) is None
