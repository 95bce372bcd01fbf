"""A page or a lock that goes astray is an error at once, and it names the request."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sapwood_common.contract.sampling import SamplingParams
from sapwood_testing.worker.fake_runner import FakeRunner
from sapwood_worker.core.cache.pages import CACHE, LedgerError
from sapwood_worker.core.scheduler.config import SchedulerConfig
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.scheduler import Scheduler
from sapwood_worker.records.model_info import ModelInfo

CONFIG = SchedulerConfig(page_size=4, num_pages=16, context_length=32)
INFO = ModelInfo(
    architecture="fake",
    dtype="none",
    context_length=32,
    vocab_size=50,
    eos_token_ids=(),
    page_size=4,
    num_pages=16,
)


def run_with(damage: Callable[[Scheduler, Request], None]) -> Scheduler:
    """Two requests end; the damage is done while the one named "culprit" decodes alone."""
    scheduler, runner = Scheduler(CONFIG), FakeRunner(INFO)
    for serial, name in enumerate(["innocent", "culprit"]):
        request = Request(serial, name, [serial] * 9, SamplingParams(max_tokens=3, ignore_eos=True))
        scheduler.add(request)
        while scheduler.has_work:
            planned = scheduler.schedule()
            if name == "culprit" and request.generated == 1:
                damage(scheduler, request)
            scheduler.update(runner.execute(planned))
    scheduler.check_idle()
    return scheduler


def take_a_page(scheduler: Scheduler, request: Request) -> None:
    scheduler._allocator.allocate(1, request.slot)


def lock_twice(scheduler: Scheduler, request: Request) -> None:
    scheduler._cache._tree.lock(scheduler._cache._rows[request.slot].node)


def free_a_page(scheduler: Scheduler, request: Request) -> None:
    scheduler._allocator.free(scheduler._cache._table.pages(request.slot)[-1:], request.slot)


def exchange_a_page(scheduler: Scheduler, request: Request) -> None:
    free_a_page(scheduler, request)
    take_a_page(scheduler, request)


@pytest.mark.parametrize("damage", [take_a_page, lock_twice, free_a_page, exchange_a_page])
def test_the_request_is_named_when_it_ends(damage: Callable[[Scheduler, Request], None]) -> None:
    with pytest.raises(LedgerError, match="request culprit"):
        run_with(damage)


def test_what_is_found_only_when_nothing_runs_names_the_request_too() -> None:
    scheduler = run_with(lambda scheduler, request: None)
    scheduler._allocator.name(0, "request culprit")
    pages = scheduler._allocator.allocate(1, 0)
    with pytest.raises(LedgerError, match="request culprit"):
        scheduler.check_idle()
    scheduler._allocator.move(pages, 0, CACHE)
    with pytest.raises(LedgerError, match="the prefix cache, allocated for request culprit"):
        scheduler.check_idle()


def test_a_lock_left_behind_names_whose_pages_it_locks() -> None:
    scheduler = run_with(lambda scheduler, request: None)
    tree = scheduler._cache._tree
    tree.lock(next(node for node in tree.nodes() if node.key[:1] == b"\x01"))
    with pytest.raises(LedgerError, match=r"lock was left behind .* request culprit$"):
        scheduler.check_idle()
