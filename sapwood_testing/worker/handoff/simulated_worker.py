"""A worker of the simulation: a scheduler with its tiers and a runner whose tokens depend on every page."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from typing import Protocol

from sapwood_testing.clock import Clock
from sapwood_testing.worker.fake_runner import FakeRunner, FakeStep
from sapwood_testing.worker.handoff.world import FINGERPRINT, VOCAB, World
from sapwood_testing.worker.storage.fake_storage import FakeExecutor
from sapwood_worker.core.cache.hierarchical import HierarchicalCache
from sapwood_worker.core.cache.host import HostPage, HostPages
from sapwood_worker.core.cache.transfer.leases import TransferLeases
from sapwood_worker.core.cache.transfer.reads import (
    PATIENCE_SECONDS,
    DeviceTransferBackend,
    PageReads,
    ReceiveBuffer,
    TransferReceiver,
)
from sapwood_worker.core.cache.transfer.transfer_backend import TransferBackend
from sapwood_worker.core.scheduler.config import SchedulerConfig
from sapwood_worker.core.scheduler.scheduler import Scheduler
from sapwood_worker.core.tiering import HostGround
from sapwood_worker.model.pools.host_pool import HEADER_BYTES, HostPool
from sapwood_worker.records.model_info import ModelInfo
from sapwood_worker.records.output import RequestOutput


class _StuckExecutor(FakeExecutor):
    """One whose jobs, now and then, do not end for longer than anybody waits."""

    def __init__(self, chance: random.Random, clock: Clock, rate: float) -> None:
        super().__init__(chance)
        self._random, self._clock, self._rate = chance, clock, rate
        self._until = 0.0

    def poll(self) -> None:
        if self._rate and self._random.random() < self._rate:
            self._until = self._clock() + PATIENCE_SECONDS + 1
        if self._clock() >= self._until:
            super().poll()


class SimulatedBackend(TransferBackend, Protocol):
    """Reads pages, if need be into a device's."""

    def into(self, runner: FakeRunner) -> DeviceTransferBackend:
        """The same for the pages of a runner."""
        ...


class SimulatedLeases(TransferLeases):
    """Remembers which leases ended because their pages did not come."""

    gone: tuple[bytes, ...] = ()

    def lost(self, entries: Iterable[HostPage]) -> list[bytes]:
        ended = super().lost(entries)
        self.gone += tuple(ended)
        return ended


class SimulatedWorker:
    """A new one for each start of its process.

    Args:
        world: The simulation's facts.
        backend: Reads pages, if this is the decode worker; None: this is the prefill worker.
        sweep: After how many turns in which it did something all of its ledgers are compared, page by page.

    Attributes:
        scheduler: The scheduler.
        runner: Its runner.
        host, pool: Its host pages and their memory.
        tiers: Its tiers.
        leases, reads, receive_buffer: What its role needs; the others are None.
    """

    def __init__(self, world: World, backend: SimulatedBackend | None, sweep: int) -> None:
        chance, size, clock, share = world.chance, world.page_size, world.clock, world.share
        self._world, self._sweep = world, sweep
        self.host = HostPages(world.host_pages)
        self.pool = HostPool(world.host_pages, size * 8)
        self.leases = self.reads = self.receive_buffer = None
        info = ModelInfo(
            architecture="fake",
            dtype="none",
            context_length=world.limit,
            vocab_size=VOCAB,
            eos_token_ids=(),
            page_size=size,
            num_pages=world.pages,
        )
        late = random.Random(chance.random())
        self.runner = FakeRunner(info, host_pool=self.pool, chance=late, copy_failures=chance.choice([0.0, 0.1]))
        if backend is None:
            self.leases = SimulatedLeases(
                self.host, size, FINGERPRINT, world.epoch, "there:1", share, clock, in_parts=chance.choice([0, 1, 2])
            )
        tiers = self.tiers = HierarchicalCache(self.host, world.pages, size, "write_through", None, self.leases)
        if backend is not None:
            executor = _StuckExecutor(random.Random(chance.random()), clock, chance.choice([0.0, 0.01]))
            self.reads = PageReads(
                HostGround(self.host, self.pool, FINGERPRINT, backend), FINGERPRINT, executor, share, clock
            )
            tiers.reads = TransferReceiver(self.reads)
            if world.lands:
                receive_buffer = ReceiveBuffer(tiers, world.pages, size * 8, FINGERPRINT, backend.into(self.runner))
                self.receive_buffer = PageReads(
                    receive_buffer, FINGERPRINT, executor, share, clock, self.reads.counters
                )
                tiers.reads = TransferReceiver(self.reads, receive_buffer, self.receive_buffer)
        config = SchedulerConfig(
            page_size=size,
            num_pages=world.pages,
            context_length=world.limit,
            max_running=chance.choice([2, 6]),
            max_step_tokens=chance.choice([3, 8, 64]),
            conservativeness=0.0,
        )
        self.scheduler = Scheduler(config, tiers, clock)
        self._overlap = chance.random() < 0.5
        self._launched: deque[FakeStep] = deque()
        self._computing = 0
        self._looked_at: set[tuple[int, int]] = set()
        self._unswept = 0

    def turn(self) -> list[RequestOutput]:
        """One round of the scheduler's loop; now and then a look at everything afterwards."""
        scheduler = self.scheduler
        outputs = scheduler.expire() + scheduler.handoffs.poll()
        for reads in (self.reads, self.receive_buffer):
            if reads is not None:
                self._check_lapsed(reads)
        if self._computing:  # others look at what its step has filled so far
            self._computing -= 1
            return outputs
        if scheduler.can_step or scheduler.has_copies or self._launched or outputs:
            if not scheduler.plans_ahead:
                outputs += self._take_results(0)
            planned = scheduler.schedule()
            if planned:
                if planned.copies is not None and planned.copies.during is not None:
                    planned.copies.during.take()
                    outputs += scheduler.handoffs.tickets()
                    self._world.counts["in parts"] += 1
                    self._computing = self._world.chance.choice([0, 0, 1, 3])
                self._launched.append(self.runner.launch(planned))
            if not self._computing:
                outputs += self._take_results(1 if planned and self._overlap else 0)
            self._world.counts["busy turns"] += 1
            self._unswept += 1
            if self._unswept >= self._sweep:
                self.check()
        return outputs

    def _check_lapsed(self, reads: PageReads) -> None:
        for prompt in reads._announced.values():
            pending = reads.arrivals[prompt.serial]
            assert not pending.pinned or self._world.clock() < pending.deadline, (
                "pages are kept though no message names them"
            )

    def _take_results(self, keep: int) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        while len(self._launched) > keep:
            outputs += self.scheduler.update(self._launched.popleft().result())
        return outputs

    def check(self) -> None:
        """Compares all ledgers page by page, and what host pages hold: a function of all tokens up to their end, whichever
        worker they are in.

        Raises:
            AssertionError: Something is wrong.
        """
        self._unswept = 0
        self.scheduler.check()
        for entry in self.host.entries():
            if entry.ready and (entry.page, entry.created) not in self._looked_at:
                self._looked_at.add((entry.page, entry.created))
                content = bytes(self.pool.record(entry.page)[HEADER_BYTES:])
                known = self._world.contents.setdefault(entry.key.proof, content)
                assert known == content, "a page holds something else"

    @property
    def keeps_unpinned(self) -> bool:
        """Whether it has leases whose pages are not pinned any more."""
        return self.leases is not None and any(not lease.pinned for lease in self.leases._leases.values())

    @property
    def settled(self) -> bool:
        """Whether it has nothing to do, and keeps nothing for anybody."""
        scheduler = self.scheduler
        return not (scheduler.has_work or scheduler.has_copies or (self.leases is not None and self.leases.num_leases))

    def check_empty(self) -> None:
        """Checks that nothing is left in it but its caches, and nothing in these once they are flushed."""
        assert self.settled, "a worker is not done"
        self.check()
        self.scheduler.flush_cache()
        assert self.scheduler.load().used_pages == 0, "a page leaked"
        assert self.host.num_free == self.host.num_pages, "a host page leaked"
