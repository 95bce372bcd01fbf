"""A worker's load account and its place in the registry."""

import pytest

from sapwood_common.errors import InvalidArgumentError, NotFoundError, UnavailableError
from sapwood_router.fleet.circuit_breaker import BreakerSettings, CircuitBreaker
from sapwood_router.fleet.registry import Registry
from sapwood_router.fleet.served_model import ServedModel
from sapwood_router.fleet.worker import Worker
from sapwood_router.routing.worker_view import Load
from sapwood_testing.clock import Clock


def served(model: str = "m", epoch: int = 1) -> ServedModel:
    return ServedModel(model, context_length=100, vocab_size=10, page_size=16, num_pages=50, epoch=epoch)


def worker(address: str = "a", clock: Clock | None = None) -> Worker:
    made = Worker(address, CircuitBreaker(BreakerSettings(), Clock()), clock or Clock())
    made.model = served()
    return made


def test_a_lease_counts_until_it_is_released_once() -> None:
    one = worker()
    first, second = one.lease(100), one.lease(30)
    assert (one.view().requests, one.view().queued_tokens) == (2, 130)
    first.prefilled()
    first.prefilled()
    assert (one.view().requests, one.view().queued_tokens) == (2, 30)
    for lease in (first, second, first, second):
        lease.release()
    assert (one.view().requests, one.view().queued_tokens) == (0, 0)


def test_embeddings_of_which_some_have_come_do_not_count_as_generating() -> None:
    one = worker()
    embeds, generates = one.lease(100, embeds=True), one.lease(10)
    for lease in (embeds, generates):
        lease.prefilled()
    assert (one.in_flight, one.embedding, one.generating) == (2, 1, 1)
    for lease in (embeds, generates):
        lease.release()
    assert (one.in_flight, one.embedding, one.generating) == (0, 0, 0)


def test_a_report_adds_what_other_routers_do_but_not_what_this_one_counted_already() -> None:
    one = worker()
    lease = one.lease(100)
    one.report(Load(running_requests=1, queued_tokens=100))
    assert (one.view().requests, one.view().queued_tokens) == (1, 100)
    one.report(
        Load(running_requests=2, waiting_requests=3, queued_tokens=500, num_pages=10, used_pages=6, evictable_pages=1)
    )
    assert (one.view().requests, one.view().queued_tokens) == (5, 500)
    assert one.view().used_share == 0.5
    lease.release()
    assert (one.view().requests, one.view().queued_tokens) == (4, 400)
    one.report(Load())
    assert (one.view().requests, one.view().queued_tokens) == (0, 0)


def test_recent_work_halves_in_a_minute() -> None:
    clock = Clock()
    one = worker(clock=clock)
    one.lease(744).release()
    assert one.view().recent_work == 1000
    clock.now = 60.0
    assert one.view().recent_work == pytest.approx(500)


def test_the_registry_offers_what_is_up_and_tells_of_changes_and_restarts() -> None:
    changes, resets = [], []
    workers = [Worker(name, CircuitBreaker(BreakerSettings(), Clock()), Clock()) for name in "abc"]
    registry = Registry(
        workers, lambda: changes.append(1), lambda address, model: resets.append((address, model.epoch))
    )
    with pytest.raises(UnavailableError):
        registry.resolve("m")
    for each, model in zip(workers, ("m", "m", "n"), strict=True):
        registry.mark_up(each, served(model))
    assert [one.address for one in registry.available("m")] == ["a", "b"]
    assert resets == [("a", 1), ("b", 1), ("c", 1)]
    before = len(changes)
    registry.mark_up(workers[0], served("m"))
    assert len(changes) == before
    registry.mark_down(workers[0], "gone")
    assert [one.address for one in registry.available("m")] == ["b"]
    registry.mark_up(workers[0], served("m"))
    assert len(resets) == 3  # it was away, but it did not restart
    registry.mark_up(workers[0], served("m", epoch=2))
    assert resets[-1] == ("a", 2)


def test_a_model_is_named_or_the_only_one_and_is_known_while_its_workers_are_down() -> None:
    workers = [Worker(name, CircuitBreaker(BreakerSettings(), Clock()), Clock()) for name in "ab"]
    registry = Registry(workers)
    registry.mark_up(workers[0], served("m"))
    assert registry.resolve(None) == "m"
    with pytest.raises(NotFoundError):
        registry.resolve("n")
    registry.mark_up(workers[1], served("n"))
    with pytest.raises(InvalidArgumentError):
        registry.resolve(None)
    registry.mark_down(workers[1], "gone")
    assert registry.resolve("n") == "n"
    assert registry.available("n") == ()
