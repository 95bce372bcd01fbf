"""Two schedulers, a backend between them that loses, delays, reorders and spoils, and a router that passes on what they say.

A seed decides everything. One scheduler computes prompts and hands them off, the other takes them over; either is killed and
started again, requests are aborted at every point of their way, messages about leases are late, lost or out of order, and while a
page is being read the source continues, so that its memory may go to somebody else. The fake runner's tokens depend on every
page, so that a stale one is a wrong token; each request ends once.

After every turn each lease must be as long as the source was told, the leases' pins within their share, no request wait and no
announced page be kept beyond its time, and the pages' own ledgers refuse every wrong step at once. All ledgers are compared
page by page, and all host pages with what their tokens say they hold, after each ``sweep`` turns of a worker that did something,
and at the end: what leaks stays, so that a sweep finds it. ``sweep=1`` finds the very turn.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from sapwood_testing.worker.handoff.lease_messages import LeaseMessages
from sapwood_testing.worker.handoff.lossy_mover import LossyBackend
from sapwood_testing.worker.handoff.simulated_router import SimulatedRouter
from sapwood_testing.worker.handoff.simulated_worker import SimulatedWorker
from sapwood_testing.worker.handoff.world import World
from sapwood_worker.core.cache.transfer.leases import LEASE_SECONDS
from sapwood_worker.core.cache.transfer.transfer_backend import TransferError
from sapwood_worker.records.handoff import HandoffTicket
from sapwood_worker.records.output import RequestOutput

TURN_SECONDS = 0.05
_TURNS = 600
_MOST_CLIENTS = 12
_MOST_AT_SOURCE = 6
"""Requests there, before strangers stop coming."""


class Simulation:
    """Router, both workers and what is between them, under one seed.

    Args:
        seed: Decides everything.
        sweep: After how many turns everything is compared.

    Attributes:
        world: Facts and counts.
        turns: How many there were.
    """

    def __init__(self, seed: int, sweep: int) -> None:
        world = self.world = World(seed)
        self.turns = 0
        self._sweep = sweep
        self._backend = LossyBackend(world, lambda: self._router.prefill, self._source_goes_on)
        self._messages = LeaseMessages(world)
        prefill, decode = SimulatedWorker(world, None, sweep), SimulatedWorker(world, self._backend, sweep)
        self._router = SimulatedRouter(world, self._messages, prefill, decode)
        self._after: deque[Callable[[], None]] = deque()

    def run(self, turns: int) -> None:
        """Lets requests come for so many turns, then waits for the last and checks that nothing is left."""
        router, clock = self._router, self.world.clock
        for _ in range(turns):
            self._turn()
        self.world.calm()
        for _ in range(5_000):
            if not router.clients:
                break
            self._turn()
        assert not router.clients, "a request never ended"
        workers = (router.prefill, router.decode)
        clock.now += LEASE_SECONDS
        for count in range(200):
            clock.now += 1.0
            for worker in workers:
                worker.turn()
            if count > 40 and all(worker.settled for worker in workers):
                break
        for worker in workers:
            worker.check_empty()

    def _turn(self) -> None:
        world, router = self.world, self._router
        chance = world.chance.random
        self.turns += 1
        world.clock.now += TURN_SECONDS
        if chance() < world.arrivals and len(router.clients) < _MOST_CLIENTS:
            router.arrive()
        if chance() < world.aborts:
            router.abort()
        if chance() < world.retries and router.try_again() and chance() < 0.5:
            self._fill()
        if chance() < 0.2 and router.prefill.keeps_unpinned:
            self._take_pages()
        if chance() < world.restarts:
            self._lose(world.chance.choice([router.prefill, router.decode]))
        if chance() < 0.2:
            router.renew()
        self._messages.deliver(router.prefill)
        router.tell()
        for worker in (router.prefill, router.decode):
            if chance() < 0.9:
                router.take(worker, self._turn_of(worker))
            while self._after:
                self._after.popleft()()

    def _turn_of(self, worker: SimulatedWorker) -> list[RequestOutput]:
        """One turn of a scheduler's loop, and a look at the promises."""
        self.world.steps += 1
        outputs = worker.turn()
        self._messages.given(output.ticket.transfer_id for output in outputs if output.ticket is not None)
        assert not self._backend.read_late, "a lease that has ended is read"
        if worker.leases is not None:
            self._messages.check(worker.leases)
        else:
            self._router.check_patience()
        return outputs

    def _fill(self) -> None:
        """A stranger comes to the source alone, and takes pages, unless it is busy enough."""
        scheduler = self._router.prefill.scheduler
        if len(scheduler._requests) < _MOST_AT_SOURCE:
            scheduler.add(self.world.filler())

    def _take_pages(self) -> None:
        """Pages of tickets that nothing keeps any more go to strangers, before somebody reads them again."""
        router, chance = self._router, self.world.chance
        for _ in range(chance.randint(1, 8)):
            self._fill()
            router.take(router.prefill, self._turn_of(router.prefill))
        router.try_again()

    def _lose(self, lost: SimulatedWorker) -> None:
        """A process is killed; another comes up at its place, and the router asks again for what was there."""
        router, world = self._router, self.world
        if lost is router.prefill:
            world.epoch += 1
            router.prefill = SimulatedWorker(world, None, self._sweep)
            self._messages.forget_all()
        elif lost is router.decode:
            router.decode = SimulatedWorker(world, self._backend, self._sweep)
        else:
            return  # it is dead already
        router.lost(lost)

    def _source_goes_on(self, ticket: HandoffTicket) -> None:
        """Turns of the source's loop while a page of it is on its way; what comes of them is dealt with afterwards."""
        world, router = self.world, self._router
        source, chance = router.prefill, world.chance
        if chance.random() < 10 * world.restarts:
            self._after.append(lambda: self._lose(source))
            raise TransferError("the source is gone")
        if chance.random() < 0.1:  # anybody who had the ticket has ended
            self._messages.end(source, ticket.transfer_id)
        for _ in range(chance.randint(1, 8)):
            if chance.random() < 0.2:
                world.clock.now += chance.choice([0.1, 1.0])
            self._messages.deliver(source)
            if chance.random() < 0.5:
                self._fill()
            outputs = self._turn_of(source)
            self._after.append(lambda outputs=outputs: router.take(source, outputs))  # type: ignore[misc]

    def counted(self) -> dict[str, int]:
        """What the ledgers of the last processes have counted."""
        leases, reads = self._router.prefill.leases, self._router.decode.reads
        assert leases is not None and reads is not None
        return {
            "expired": leases.counters.expired,
            "unpinned": leases.counters.unpinned,
            "pulled": reads.counters.pages,
            "pulled early": reads.counters.early,
            "not good": reads.counters.stale,
            "failed reads": reads.counters.failures,
            "fallbacks": reads.counters.fallbacks,
        }


def run_seeds(first: int, steps: int, sweep: int = 8) -> Counter[str]:
    """Runs seeds from ``first`` on until the schedulers have made so many turns; what happened.

    Raises:
        AssertionError: Something went wrong; with its seed.
    """
    totals: Counter[str] = Counter()
    seed = first
    while totals["steps"] < steps:
        simulation = Simulation(seed, sweep)
        try:
            simulation.run(_TURNS)
        except Exception as error:
            raise AssertionError(f"seed {seed}, turn {simulation.turns}: {error!r}") from error
        totals.update(simulation.world.counts)
        totals.update(simulation.counted())
        totals["steps"] += simulation.world.steps
        seed += 1
    return totals
