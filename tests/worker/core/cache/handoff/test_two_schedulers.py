"""Two schedulers, a mover between them that loses, delays, reorders and spoils, and a router that passes on what they say.

A seed decides everything. One scheduler computes prompts and hands them off, the other takes them over; either is killed and
started anew, requests are aborted at every point of their way, messages about leases are late, lost or out of order, and while a
page is being read the source goes on, so that its memory may go to somebody else. The fake runner's tokens depend on every page,
so that a stale one is a wrong token. After every turn both ledgers are checked page by page; each request ends once.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from sapwood_common.contract.sampling import SamplingParams
from sapwood_testing.clock import Clock
from sapwood_testing.worker.fake_runner import FakeRunner, FakeStep, continuation
from sapwood_testing.worker.fake_storage import FakeExecutor
from sapwood_worker.core.cache.handoff.leases import LEASE_SECONDS, HandoffLeases
from sapwood_worker.core.cache.handoff.mover import MoverError
from sapwood_worker.core.cache.handoff.pulls import PATIENCE_SECONDS, Pulls
from sapwood_worker.core.cache.hierarchical import HierarchicalCache
from sapwood_worker.core.cache.host_pages import HostPages
from sapwood_worker.core.cache.storage.record import header_of, namespace_of
from sapwood_worker.core.scheduler.config import SchedulerConfig
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.scheduler import Scheduler
from sapwood_worker.model.pools.host_pool import HEADER_BYTES, HostPool
from sapwood_worker.records.handoff import HandoffTicket
from sapwood_worker.records.model_info import ModelInfo
from sapwood_worker.records.output import RequestOutput

VOCAB = 60
FINGERPRINT = bytes.fromhex(namespace_of("model"))
NAMESPACES = [b"", b"", b"tenant"]
TURN_SECONDS = 0.05


@dataclass
class Client:
    """What is known of a request, by its router."""

    prompt: list[int]
    sampling: SamplingParams
    namespace: bytes
    expected: Iterator[int]
    received: list[int] = field(default_factory=list)
    ticket: HandoffTicket | None = None
    announced: HandoffTicket | None = None
    at: Worker | None = None


class StuckExecutor(FakeExecutor):
    """One whose jobs, now and then, do not end for longer than anybody waits."""

    def __init__(self, chance: random.Random, clock: Clock, rate: float) -> None:
        super().__init__(chance)
        self._random, self._clock, self._rate = chance, clock, rate
        self._until = 0.0

    def poll(self) -> None:
        if self._random.random() < self._rate:
            self._until = self._clock() + PATIENCE_SECONDS + 1
        if self._clock() >= self._until:
            super().poll()


class Worker:
    """A scheduler with its tiers and a runner; a new one for each start of its process."""

    def __init__(self, simulation: Simulation, role: str, epoch: int) -> None:
        chance, size = simulation.chance, simulation.page_size
        limit, pages = simulation.limit, simulation.pages
        self.host = HostPages(simulation.host_pages)
        self.pool = HostPool(simulation.host_pages, size * 8)
        clock, share = simulation.clock, simulation.share
        self.leases = self.pulls = None
        if role == "prefill":
            self.leases = HandoffLeases(self.host, size, FINGERPRINT, epoch, "there:1", share, clock)
        else:
            executor = StuckExecutor(random.Random(chance.random()), clock, chance.choice([0.0, 0.01]))
            self.pulls = Pulls(self.host, self.pool, FINGERPRINT, simulation, executor, share, clock)
        self.tiers = HierarchicalCache(self.host, pages, size, "write_through", None, self.leases, self.pulls)
        config = SchedulerConfig(
            page_size=size,
            num_pages=pages,
            context_length=limit,
            max_running=chance.choice([2, 6]),
            max_step_tokens=chance.choice([3, 8, 64]),
            conservativeness=0.0,
        )
        self.scheduler = Scheduler(config, self.tiers, clock)
        info = ModelInfo(
            architecture="fake",
            dtype="none",
            context_length=limit,
            vocab_size=VOCAB,
            eos_token_ids=(),
            page_size=size,
            num_pages=pages,
        )
        self.overlap = chance.random() < 0.5
        late = random.Random(chance.random())
        self.runner = FakeRunner(info, host_pool=self.pool, chance=late, copy_failures=chance.choice([0.0, 0.1]))
        self.launched: deque[FakeStep] = deque()
        self.checked: set[tuple[int, int]] = set()
        self.idle = False

    def turn(self) -> list[RequestOutput]:
        """One round of the loop."""
        scheduler = self.scheduler
        outputs = scheduler.expire() + scheduler.handed_off()
        self.idle = not (scheduler.can_step or scheduler.has_copies or self.launched or outputs)
        if not self.idle:
            if not scheduler.plans_ahead:
                outputs += self.take_results(0)
            planned = scheduler.schedule()
            if planned:
                self.launched.append(self.runner.launch(planned))
            outputs += self.take_results(1 if planned and self.overlap else 0)
        return outputs

    def take_results(self, keep: int) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        while len(self.launched) > keep:
            outputs += self.scheduler.update(self.launched.popleft().result())
        return outputs


class Simulation:
    """Router, both workers and what is between them, under one seed."""

    def __init__(self, seed: int) -> None:
        chance = self.chance = random.Random(seed)
        self.page_size = chance.choice([1, 2, 4])
        self.limit = chance.randint(20, 40)
        self.pages = int(self.limit * chance.uniform(1, 2.5) / self.page_size) + 1
        self.host_pages = max(4, int(self.pages * chance.choice([0.5, 1, 2, 4])))
        self.share = chance.choice([0.1, 0.3, 0.5])
        self.clock = Clock()
        self.faults = chance.choice([0.0, 0.2, 0.5])
        self.loss = chance.choice([0.0, 0.1, 0.4])
        self.abort_rate = chance.choice([0.0, 0.02, 0.1])
        self.restart_rate = chance.choice([0.0, 0.002, 0.01])
        self.retry_rate = chance.choice([0.0, 0.05, 0.2])
        self.arrival_rate = chance.choice([0.1, 0.4])
        self.epoch = 0
        self.prefill, self.decode = Worker(self, "prefill", 0), Worker(self, "decode", 0)
        self.documents = [self.tokens(chance.randint(4, self.limit - 6)) for _ in range(chance.randint(2, 4))]
        self.clients: dict[int, Client] = {}
        self.tickets: dict[bytes, float] = {}
        """When the lease of each ends."""
        self.messages: list[tuple[float, str, bytes]] = []
        self.news: list[tuple[float, HandoffTicket, array[int], bytes]] = []
        self.waiting: dict[int, float] = {}
        self.contents: dict[bytes, bytes] = {}
        self.serials = 0
        self.turns = self.steps = 0
        self.after: deque[Callable[[], None]] = deque()
        self.others: set[int] = set()
        self.read_late = False
        self.counts: Counter[str] = Counter()

    def tokens(self, count: int) -> list[int]:
        return [self.chance.randrange(VOCAB) for _ in range(count)]

    # What clients do, and the router for them

    def arrive(self) -> None:
        chance = self.chance
        document = chance.choice(self.documents)
        prompt = document[: chance.randint(1, len(document))] + self.tokens(chance.choice([0, 1, 2, 3, 12]))
        prompt = prompt[: self.limit - 8]
        sampling = SamplingParams(seed=chance.getrandbits(60), max_tokens=chance.choice([2, 3, 8]), ignore_eos=True)
        self.place(Client(prompt, sampling, chance.choice(NAMESPACES), continuation(prompt, sampling, VOCAB)))

    def place(self, client: Client) -> None:
        """To the decode worker with a ticket, if there is one; else to the prefill worker, or where there should be none."""
        if client.ticket is not None and client.ticket.epoch != self.epoch:
            client.ticket = None
        client.announced = None
        self.serials += 1
        serial, known = self.serials, len(client.received)
        left = client.sampling.max_tokens - known
        hands_off = client.ticket is None and left > 1 and self.chance.random() < 0.9
        client.at = self.prefill if hands_off else self.decode
        sampling = SamplingParams(seed=client.sampling.seed, max_tokens=left, ignore_eos=True)
        prompt = client.prompt + client.received
        request = Request(
            serial,
            f"r{serial}",
            array("I", prompt),
            sampling,
            client.namespace,
            output_tokens=known,
            hands_off=hands_off,
            ticket=client.ticket,
        )
        client.at.scheduler.add(request)
        self.clients[serial] = client
        if request.held:
            self.waiting[serial] = self.clock() + PATIENCE_SECONDS

    def abort(self) -> None:
        if self.clients:
            serial = self.chance.choice(list(self.clients))
            client = self.clients.pop(serial)
            assert client.at is not None and client.at.scheduler.abort(serial)
            assert not client.at.scheduler.abort(serial)
            self.over(client)
            self.counts["aborted"] += 1

    def over(self, client: Client) -> None:
        if client.ticket is not None:
            self.say("release", client.ticket.transfer_id)
        elif client.announced is not None:  # the source has ended it, since the request has ended there
            assert self.prefill.leases is not None
            assert self.prefill.leases.find(client.announced.transfer_id, self.epoch) is None
            self.tickets.pop(client.announced.transfer_id, None)

    def try_again(self) -> None:
        """A request begins again at a decode worker that has forgotten everything; its ticket may be an old one."""
        there = [serial for serial, client in self.clients.items() if client.ticket is not None]
        if there:
            serial = self.chance.choice(there)
            client = self.clients.pop(serial)
            assert client.at is self.decode and self.decode.scheduler.abort(serial)
            self.decode.scheduler.flush_cache()
            self.place(client)
            self.counts["tried again"] += 1

    def lose(self, lost: Worker) -> None:
        """A process is killed; another comes up at its place, and the router asks again for what was there."""
        if lost not in (self.prefill, self.decode):
            return  # it is dead already
        if lost is self.prefill:
            self.epoch += 1
            self.prefill = Worker(self, "prefill", self.epoch)
            self.tickets.clear()
        else:
            self.decode = Worker(self, "decode", 0)
        again = {serial: client for serial, client in self.clients.items() if client.at is lost}
        for serial, client in again.items():
            del self.clients[serial]
            self.place(client)
        self.counts["lost"] += 1

    def take(self, worker: Worker, outputs: Sequence[RequestOutput]) -> None:
        if worker not in (self.prefill, self.decode):
            return  # it was killed before it could say so
        for output in outputs:
            if output.serial in self.others:
                continue
            client = self.clients[output.serial]  # it has ended before, or was aborted, if it is not there
            assert client.at is worker
            assert len(output.token_ids) <= 1
            for token in output.token_ids:
                assert token == next(client.expected), "a wrong token"
                client.received.append(token)
            if output.ticket is not None and output.finish_reason is None:
                self.announce(client, output.ticket)
            elif output.finish_reason == "handoff":
                assert output.ticket is not None
                before = client.announced
                if before is not None and before.transfer_id == output.ticket.transfer_id:
                    count = len(before.places)
                    assert output.ticket.places[:count] == before.places and not output.ticket.first_page
                if self.chance.random() < 2 * self.abort_rate:  # its client has left, which the worker hears after all
                    assert not worker.scheduler.abort(output.serial)
                    assert worker.leases is not None
                    assert worker.leases.find(output.ticket.transfer_id, self.epoch) is None
                    del self.clients[output.serial]
                    self.tickets.pop(output.ticket.transfer_id, None)  # it may have ended by its time on the way
                    self.counts["aborted with a ticket"] += 1
                    continue
                client.ticket = output.ticket if self.chance.random() > self.loss / 4 else None
                del self.clients[output.serial]
                self.counts["tickets"] += 1
                self.counts["whole"] += len(output.ticket.page_hashes) == len(client.prompt) // self.page_size
                self.place(client)
            elif output.finish_reason is not None:
                assert output.finish_reason == "length" and len(client.received) == client.sampling.max_tokens
                del self.clients[output.serial]
                self.over(client)
                self.counts["finished"] += 1

    def announce(self, client: Client, ticket: HandoffTicket) -> None:
        """Pages can be read while the prompt is computed: the other side is told, late, out of order or not at all."""
        known = client.announced if client.announced is not None else ticket
        again = known.transfer_id == ticket.transfer_id and known is not ticket
        client.announced = known.joined(ticket) if again else ticket
        assert client.announced is not ticket or not ticket.first_page
        self.counts["announced"] += 1
        prompt = array("I", [] if again else client.prompt + client.received)
        if self.chance.random() >= self.loss:
            self.news.append((self.clock() + self.chance.uniform(0, 0.06), ticket, prompt, client.namespace))

    def tell(self) -> None:
        """The decode worker hears of pages."""
        due = [news for news in self.news if news[0] <= self.clock()]
        self.news = [news for news in self.news if news[0] > self.clock()]
        for _, ticket, prompt, namespace in due:
            self.decode.scheduler.announced(ticket, prompt, namespace)

    # What is between them

    def say(self, what: str, transfer_id: bytes) -> None:
        """A message about a lease goes to the source: lost, late, or out of order."""
        if self.chance.random() >= self.loss:
            self.messages.append((self.clock() + self.chance.uniform(0, 0.4), what, transfer_id))

    def deliver(self) -> None:
        due = [message for message in self.messages if message[0] <= self.clock()]
        self.messages = [message for message in self.messages if message[0] > self.clock()]
        leases = self.prefill.leases
        assert leases is not None
        for _, what, transfer_id in due:
            if what == "release":
                self.prefill.scheduler.keep_handoffs([], [transfer_id])
                self.tickets.pop(transfer_id, None)
                assert leases.find(transfer_id, self.epoch) is None
            elif leases.find(transfer_id, self.epoch) is not None:
                self.prefill.scheduler.keep_handoffs([transfer_id], [])
                self.tickets[transfer_id] = self.clock() + LEASE_SECONDS

    def read(self, ticket: HandoffTicket, indices: Sequence[int], buffers: Sequence[memoryview]) -> list[bool]:
        """The mover, on a bad day: pages come in any order, and the source's life goes on while each is on its way."""
        order = list(zip(indices, buffers, range(len(indices)), strict=True))
        self.chance.shuffle(order)
        answers = [False] * len(order)
        for index, buffer, place in order:
            if self.chance.random() < self.faults / 3:
                buffer[: HEADER_BYTES + 1] = bytes(HEADER_BYTES + 1)
                raise MoverError("the way is cut")
            answers[place] = self.read_page(ticket, index, buffer)
        return answers

    def read_page(self, ticket: HandoffTicket, index: int, buffer: memoryview) -> bool:
        source, chance = self.prefill, self.chance
        assert source.leases is not None
        lease = source.leases.find(ticket.transfer_id, ticket.epoch)
        if lease is None or not source.leases.readable(lease, index):
            return False
        record = source.pool.record(lease.ticket.places[index][0])
        if chance.random() < self.faults:
            self.source_goes_on(ticket)
        sent = bytearray(header_of(record, lease.keys[index], FINGERPRINT.hex()) + record[HEADER_BYTES:])
        if chance.random() < self.faults:  # between what was checked and what is sent
            self.source_goes_on(ticket)
        if chance.random() < self.faults / 3:
            place = HEADER_BYTES + chance.randrange(self.page_size * 8)
            sent[place] ^= 1 << chance.randrange(8)
            self.counts["spoilt"] += 1
        buffer[:] = sent
        if self.prefill is not source or not source.leases.readable(lease, index):
            self.counts["stale"] += 1
            return False
        self.read_late |= source.leases.find(ticket.transfer_id, ticket.epoch) is not lease
        source.leases.was_read(lease, index)
        return True

    def source_goes_on(self, ticket: HandoffTicket) -> None:
        """Turns of the source's loop while a page of it is on its way; what comes of them is dealt with afterwards."""
        source, chance = self.prefill, self.chance
        if chance.random() < 10 * self.restart_rate:
            self.after.append(lambda: self.lose(source))
            raise MoverError("the source is gone")
        if chance.random() < 0.1:  # whoever had the ticket has ended
            source.scheduler.keep_handoffs([], [ticket.transfer_id])
            self.tickets.pop(ticket.transfer_id, None)
        for _ in range(chance.randint(1, 8)):
            if chance.random() < 0.2:
                self.clock.now += chance.choice([0.1, 1.0])
            self.deliver()
            if chance.random() < 0.5:
                self.fill()
            outputs = self.turn_of(source)
            self.after.append(lambda outputs=outputs: self.take(source, outputs))

    def fill(self) -> None:
        """Others come to the source alone, and take its pages."""
        self.serials += 1
        self.others.add(self.serials)
        sampling = SamplingParams(seed=1, max_tokens=1, ignore_eos=True)
        prompt = array("I", self.tokens(self.limit - 4))
        self.prefill.scheduler.add(Request(self.serials, "other", prompt, sampling))

    # Turns

    def run(self, turns: int) -> None:
        """Lets requests come for so many turns, then waits for the last and checks that nothing is left."""
        for _ in range(turns):
            self.turn()
        self.arrival_rate = self.abort_rate = self.restart_rate = self.retry_rate = self.faults = 0.0
        for _ in range(5_000):
            if not self.clients:
                break
            self.turn()
        assert not self.clients, "a request never ended"
        self.clock.now += LEASE_SECONDS
        for _ in range(200):
            self.clock.now += 1.0
            for worker in (self.prefill, self.decode):
                self.turn_of(worker)
        for worker in (self.prefill, self.decode):
            assert not worker.scheduler.has_work and not worker.scheduler.has_copies
            worker.scheduler.check()
            worker.scheduler.flush_cache()
            assert worker.scheduler.load().used_pages == 0
            assert worker.host.num_free == worker.host.num_pages, "a host page leaked"
        assert self.prefill.leases is not None and not self.prefill.leases.num_leases

    def turn(self) -> None:
        chance = self.chance
        self.turns += 1
        self.clock.now += TURN_SECONDS
        if chance.random() < self.arrival_rate and len(self.clients) < 12:
            self.arrive()
        if chance.random() < self.abort_rate:
            self.abort()
        if chance.random() < self.retry_rate:
            if chance.random() < 0.5:
                self.fill()
            self.try_again()
        if chance.random() < self.restart_rate:
            self.lose(chance.choice([self.prefill, self.decode]))
        if chance.random() < 0.2:
            for client in self.clients.values():
                if (held := client.ticket or client.announced) is not None:
                    self.say("renew", held.transfer_id)
        self.deliver()
        self.tell()
        for worker in (self.prefill, self.decode):
            if chance.random() < 0.9:
                self.take(worker, self.turn_of(worker))
            while self.after:
                self.after.popleft()()

    def turn_of(self, worker: Worker) -> list[RequestOutput]:
        """One turn of a scheduler's loop, and a look at everything afterwards."""
        self.steps += 1
        was_idle = worker.idle
        outputs = worker.turn()
        given = [output.ticket.transfer_id for output in outputs if output.ticket is not None]
        self.tickets.update(dict.fromkeys(given, self.clock() + LEASE_SECONDS))
        assert not self.read_late, "a lease that has ended is read"  # said here, as a mover may fail
        if not was_idle or not worker.idle:  # else nothing can have changed since it was looked at last
            worker.scheduler.check()
            self.check_contents(worker)
        if worker.leases is not None:
            self.check_leases(worker.leases, worker.host.num_pages)
        else:
            held = [serial for serial, request in worker.scheduler._requests.items() if request.held]
            assert all(self.clock() < self.waiting[serial] for serial in held), "a request waits on"
        return outputs

    def counted(self) -> dict[str, int]:
        """What the ledgers of the last processes have counted."""
        leases, pulls = self.prefill.leases, self.decode.pulls
        assert leases is not None and pulls is not None
        return {
            "expired": leases.counters.expired,
            "unpinned": leases.counters.unpinned,
            "pulled": pulls.counters.pages,
            "pulled early": pulls.counters.early,
            "not good": pulls.counters.stale,
            "failed reads": pulls.counters.failures,
            "fallbacks": pulls.counters.fallbacks,
        }

    def check_contents(self, worker: Worker) -> None:
        """What a host page holds is a function of all tokens up to it, whichever worker it is in."""
        for entry in worker.host.entries():
            if entry.ready and (entry.page, entry.created) not in worker.checked:
                worker.checked.add((entry.page, entry.created))
                content = bytes(worker.pool.record(entry.page)[HEADER_BYTES:])
                assert self.contents.setdefault(entry.key.proof, content) == content, "a page holds something else"

    def check_leases(self, leases: HandoffLeases, num_pages: int) -> None:
        assert leases.num_pinned <= int(self.share * num_pages), "leases pin more than their share"
        for transfer_id, until in list(self.tickets.items()):
            there = leases.find(transfer_id, self.epoch) is not None
            assert there == (self.clock() < until), "a lease lasts until nobody renews it"
            if not there:
                del self.tickets[transfer_id]


def run_seeds(first: int, steps: int) -> Counter[str]:
    """Runs seeds from ``first`` on until the schedulers have made so many turns; what happened."""
    totals: Counter[str] = Counter()
    seed = first
    while totals["steps"] < steps:
        simulation = Simulation(seed)
        try:
            simulation.run(600)
        except Exception as error:
            raise AssertionError(f"seed {seed}, turn {simulation.turns}: {error!r}") from error
        totals.update(simulation.counts)
        totals.update(simulation.counted())
        totals["steps"] += simulation.steps
        seed += 1
    return totals


def test_no_loss_delay_or_disorder_between_two_schedulers_gives_a_wrong_token_or_keeps_a_page() -> None:
    totals = run_seeds(0, steps=20_000)
    print(totals)
    assert min(totals.values()) > 20, f"too little happened: {totals}"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_hundred_thousand_turns_of_two_schedulers() -> None:
    totals = run_seeds(1_000_000, steps=200_000)
    print(totals)
    assert min(totals.values()) > 100, f"too little happened: {totals}"
