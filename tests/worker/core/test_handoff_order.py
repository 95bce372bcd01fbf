"""In which order the scheduler process does what a handed-off prompt needs: the device first, then its client, then others."""

from __future__ import annotations

import time
from array import array
from typing import Any, cast

import pytest

from sapwood_common.contract.sampling import SamplingParams
from sapwood_testing.clock import Clock
from sapwood_testing.worker.fake_runner import FakeRunner
from sapwood_worker.core.cache.hierarchical import HierarchicalCache
from sapwood_worker.core.cache.host import HostPages
from sapwood_worker.core.cache.transfer.leases import LEASE_SECONDS, TransferLeases
from sapwood_worker.core.event_loop import EventLoop
from sapwood_worker.core.scheduler.config import SchedulerConfig
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.scheduler import Scheduler
from sapwood_worker.ipc.messages import FromScheduler, KeepHandoffs, Shutdown, Step, Submit, ToScheduler
from sapwood_worker.model.pools.host_pool import HostPool
from sapwood_worker.records.model_info import ModelInfo
from sapwood_worker.records.step import Step as PlannedStep

PAGE, PAGES = 4, 32
INFO = ModelInfo(
    architecture="fake",
    dtype="none",
    context_length=64,
    vocab_size=50,
    eos_token_ids=(),
    page_size=PAGE,
    num_pages=PAGES,
)


class Diary:
    """A channel with one request, and a runner, that note what is done.

    Args:
        in_parts: As :class:`TransferLeases` takes it.
        step_seconds: What each step takes, by the clock of leases.
        chunk: Tokens of a step.

    Attributes:
        transfers: The transfers' ids of all tickets so far.
    """

    def __init__(self, in_parts: int, step_seconds: float = 0.0, chunk: int = 64) -> None:
        self.lines: list[str] = []
        self.transfers: set[bytes] = set()
        self._clock, self._step_seconds = Clock(), step_seconds
        pool, host = HostPool(PAGES, PAGE * 8), HostPages(PAGES)
        self._runner = FakeRunner(INFO, host_pool=pool)
        self.asynchronous = True
        self.leases = TransferLeases(host, PAGE, b"f" * 32, 5, ":1", 1.0, self._clock, in_parts=in_parts)
        settings = SchedulerConfig(
            page_size=PAGE, num_pages=PAGES, context_length=64, max_running=2, max_step_tokens=chunk
        )
        self._scheduler = Scheduler(settings, HierarchicalCache(host, PAGES, PAGE, leases=self.leases))
        sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        self._due: list[ToScheduler] = [Submit(1, "r1", array("I", range(21)).tobytes(), sampling, hands_off=True)]

    def run(self) -> list[str]:
        """What was done, in order."""
        EventLoop(self._scheduler, cast(Any, self), self).run()
        return self.lines

    def launch(self, step: PlannedStep) -> Any:
        if len(step.rows):
            self.lines.append("a step is launched")
        self._clock.now += self._step_seconds
        return self._runner.launch(step)

    def receive(self, *, wait: bool) -> list[ToScheduler]:
        due, self._due = self._due, []
        if self.transfers and not wait:  # somebody renews them
            due.append(KeepHandoffs(list(self.transfers), []))
        return due or ([Shutdown()] if wait else [])

    def send(self, message: FromScheduler) -> None:
        assert isinstance(message, Step)
        for output in message.outputs:
            if output.token_ids:
                self.lines.append("a token is sent")
            if output.ticket is not None:
                self.transfers.add(output.ticket.transfer_id)
                self.lines.append("the ticket is sent" if output.finish_reason else "pages are announced")


def test_pages_are_announced_at_launch_and_the_token_precedes_the_ticket() -> None:
    assert Diary(2).run() == ["a step is launched", "pages are announced", "a token is sent", "the ticket is sent"]


def test_no_token_is_computed_after_the_one_that_a_handed_off_prompt_ends_with() -> None:
    assert Diary(0).run() == ["a step is launched", "a token is sent", "the ticket is sent"]


def test_a_lease_that_is_renewed_outlasts_steps_that_take_longer() -> None:
    diary = Diary(2, step_seconds=LEASE_SECONDS + 1, chunk=8)
    assert diary.run()[-2:] == ["a token is sent", "the ticket is sent"]
    assert diary.lines.count("a step is launched") == 3
    assert len(diary.transfers) == 1 and not diary.leases.counters.expired


@pytest.mark.parametrize("in_parts", [0, 2])
def test_pages_are_named_before_the_host_has_them_only_where_they_are_read_in_parts(in_parts: int) -> None:
    # Of pages that ranks hold in parts nothing can be read before all of it is in the host's memory.
    host = HostPages(PAGES)
    leases = TransferLeases(host, PAGE, b"f" * 32, 5, ":1", 1.0, time.monotonic, in_parts=in_parts)
    tiers = HierarchicalCache(host, PAGES, PAGE, leases=leases)
    settings = SchedulerConfig(page_size=PAGE, num_pages=PAGES, context_length=64, max_running=2, max_step_tokens=64)
    scheduler, runner = Scheduler(settings, tiers), FakeRunner(INFO, host_pool=HostPool(PAGES, PAGE * 8))
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    scheduler.add(Request(1, "r1", array("I", range(6)), sampling, hands_off=True))
    scheduler.update(runner.execute(scheduler.schedule()))
    assert len(scheduler.handoffs.poll()) == bool(in_parts)
    scheduler.update(runner.execute(scheduler.schedule()))
    assert len(scheduler.handoffs.poll()) == (not in_parts)
