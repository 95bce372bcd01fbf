"""Both ledgers of KV transfers under hypothesis: a worker that keeps pages, one that reads, and a network that loses, delays,
reorders, spoils and mixes up what it carries. Nothing here knows torch, gRPC or a socket."""

from __future__ import annotations

import os
import random
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sapwood_testing.clock import Clock
from sapwood_testing.worker.storage.fake_storage import FakeExecutor
from sapwood_worker.core.cache.host import HostPages
from sapwood_worker.core.cache.page_key import PageChain, PageName
from sapwood_worker.core.cache.storage.record import header_of, namespace_of
from sapwood_worker.core.cache.transfer.leases import TransferLeases
from sapwood_worker.core.cache.transfer.reads import NEWS_SECONDS, PATIENCE_SECONDS, PageReads
from sapwood_worker.core.cache.transfer.transfer_backend import PartCount, TransferError
from sapwood_worker.core.tiering import HostGround
from sapwood_worker.model.pools.host_pool import HEADER_BYTES, HostPool
from sapwood_worker.records.handoff import HandoffTicket

SIZE = 2
BYTES = 24
PAGES = 12
LEASE = 2.0
FAULTS = ("overwritten", "spoilt", "released")
FINGERPRINT = bytes.fromhex(namespace_of("model"))
DOCUMENTS = [[d] * 4 + [d * 7 + place for place in range(12)] for d in (1, 1, 2, 3, 4)]


def content_of(name: PageName) -> bytes:
    """What a page holds: a function of all tokens up to it."""
    return name.key.proof[:BYTES]


class Source:
    """A worker that keeps pages; a new one, of another epoch, for each start of its process."""

    def __init__(self, epoch: int, clock: Clock) -> None:
        self.pool, self.host = HostPool(PAGES, BYTES), HostPages(PAGES)
        self.leases = TransferLeases(self.host, SIZE, FINGERPRINT, epoch, "there:1", 0.7, clock, LEASE)
        self.coming: list[Any] = []

    def store(self, names: Sequence[PageName]) -> None:
        """Its scheduler has pages copied to the host; what must go for them goes."""
        self.coming += self.host.reserve(names)

    def stored(self) -> None:
        for entry in self.coming:
            self.pool.record(entry.page)[HEADER_BYTES:] = content_of(entry.name)
        self.host.written(self.coming)
        self.coming = []

    def fill(self, number: int) -> None:
        """Other prompts take all the room that there is."""
        chain = PageChain(b"other", SIZE)
        chain.extend(array("I", [number, *range(2 * PAGES)]), SIZE * PAGES)
        self.store(chain.pages)
        self.stored()


class Handoffs(RuleBasedStateMachine):
    """A source, a puller, and a backend between them."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.epoch = 1
        self.source = Source(self.epoch, self.clock)
        self.pool, self.host = HostPool(PAGES, BYTES), HostPages(PAGES)
        self.chance = random.Random(5)
        self.faults = 0.0
        self.parts = PartCount()
        self.reads = PageReads(
            HostGround(self.host, self.pool, FINGERPRINT, self), FINGERPRINT, FakeExecutor(self.chance), 0.7, self.clock
        )
        self.serials = 0
        self.offered: dict[int, list[int]] = {}
        self.computing: dict[int, PageChain] = {}
        self.early: dict[bytes, list[int]] = {}
        self.ended: set[bytes] = set()
        self.tickets: dict[bytes, tuple[HandoffTicket, list[int]]] = {}
        self.renewed: dict[bytes, float] = {}
        self.waiting: dict[int, float] = {}
        self.started: set[int] = set()

    # The backend: what a TcpBackend and a PageServer do between them, on a bad day.

    def read(self, ticket: HandoffTicket, indices: Sequence[int], buffers: Sequence[memoryview]) -> list[bool]:
        if self.chance.random() < self.faults:
            raise TransferError("the way is cut")
        return [self.read_page(ticket, index, buffer) for index, buffer in zip(indices, buffers, strict=True)]

    def read_page(self, ticket: HandoffTicket, index: int, buffer: memoryview) -> bool:
        source, leases = self.source, self.source.leases
        lease = leases.find(ticket.transfer_id, ticket.epoch)
        if lease is None or not leases.readable(lease, index):
            buffer[:3] = b"???"
            return False
        assert ticket.epoch == self.epoch and ticket.transfer_id not in self.ended
        record = source.pool.record(lease.ticket.places[index][0])
        fault = self.chance.choice(FAULTS) if self.chance.random() < self.faults else ""
        if fault == "overwritten":  # while the page is being read its memory goes to somebody else
            leases._unpin(lease)
            source.fill(self.chance.randrange(10**6))
        sent = header_of(record, lease.keys[index], FINGERPRINT.hex()) + bytes(record[HEADER_BYTES:])
        if fault == "spoilt":
            place = self.chance.choice(
                [self.chance.randrange(HEADER_BYTES), HEADER_BYTES + self.chance.randrange(BYTES)]
            )
            sent = sent[:place] + bytes([sent[place] ^ 1]) + sent[place + 1 :]
        if fault == "released":
            self.release(ticket.transfer_id)
        buffer[:] = sent
        if not leases.readable(lease, index):
            return False
        assert fault != "released"
        leases.was_read(lease, index)
        return True

    def release(self, transfer_id: bytes) -> None:
        self.source.leases.release([transfer_id])
        self.ended.add(transfer_id)
        assert self.source.leases.find(transfer_id, self.epoch) is None

    @rule(number=st.integers(0, 10**6))
    def fill(self, number: int) -> None:
        self.source.fill(number)

    @rule(faults=st.sampled_from([0.0, 0.2, 0.5]))
    def weather(self, faults: float) -> None:
        self.faults = faults

    @rule(document=st.sampled_from(DOCUMENTS), length=st.sampled_from([1, 5, 9, 16, 16]), copied=st.booleans())
    def hand_off(self, document: list[int], length: int, copied: bool) -> None:
        """The source has computed a prompt; its pages are copied to the host now, or later."""
        self.begin(document, length, length, copied)
        self.compute_rest(self.serials, copied)

    @rule(document=st.sampled_from(DOCUMENTS), pages=st.integers(0, 8), copied=st.booleans())
    def compute_first_chunk(self, document: list[int], pages: int, copied: bool) -> None:
        self.begin(document, len(document), pages * SIZE, copied)

    def begin(self, document: list[int], length: int, computed: int, copied: bool) -> None:
        tokens = array("I", document[:length])
        chain = PageChain(b"", SIZE)
        chain.extend(tokens, length)
        self.source.store(chain.pages[: computed // SIZE])
        self.serials += 1
        self.source.leases.offer(self.serials, tokens, b"")
        self.offered[self.serials] = document
        self.computing[self.serials] = chain
        if copied:
            self.copies_end()

    @precondition(lambda self: self.computing)
    @rule(data=st.data(), copied=st.booleans())
    def compute_last_chunk(self, data: st.DataObject, copied: bool) -> None:
        self.compute_rest(data.draw(st.sampled_from(sorted(self.computing))), copied)

    def compute_rest(self, serial: int, copied: bool) -> None:
        self.source.store(self.computing.pop(serial).pages)
        self.source.leases.computed(serial)
        if copied:
            self.copies_end()

    @precondition(lambda self: self.computing)
    @rule(data=st.data())
    def end_before_it_is_computed(self, data: st.DataObject) -> None:
        serial = data.draw(st.sampled_from(sorted(self.computing)))
        before = set(self.source.leases._leases)
        self.source.leases.withdraw(serial)
        self.ended |= before - set(self.source.leases._leases)
        del self.offered[serial], self.computing[serial]

    @rule()
    def copies_end(self) -> None:
        self.source.stored()
        self.grant()

    @precondition(lambda self: self.offered)
    @rule(data=st.data())
    def abort_offer(self, data: st.DataObject) -> None:
        serial = data.draw(st.sampled_from(sorted(self.offered)))
        before = set(self.source.leases._leases)
        assert self.source.leases.cancel(serial)
        self.ended |= before - set(self.source.leases._leases)
        del self.offered[serial]
        self.computing.pop(serial, None)

    @rule()
    def grant(self) -> None:
        """The source's loop turns."""
        for serial, ticket, complete in self.source.leases.poll():
            assert complete is (serial not in self.computing)
            self.renewed[ticket.transfer_id] = self.clock()
            if complete:
                assert not ticket.first_page
                self.tickets[ticket.transfer_id] = ticket, self.offered.pop(serial)
            elif self.chance.random() >= self.faults:  # else it is lost on its way
                document = self.early.setdefault(ticket.transfer_id, self.offered[serial])
                chain = PageChain(b"", SIZE)
                chain.extend(array("I", document), 0 if ticket.first_page else len(document))
                self.reads.announced(ticket, chain.pages, self.chance.choice([0, 0, 2]))
        for each, at in self.renewed.items():
            there = self.source.leases.find(each, self.epoch) is not None
            assert there == (self.clock() < at + LEASE and each not in self.ended), (
                "a lease lasts until nobody renews it"
            )
            if not there:
                self.ended.add(each)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), release=st.booleans())
    def keep(self, data: st.DataObject, release: bool) -> None:
        transfer_id = data.draw(st.sampled_from(sorted(self.tickets)))
        if release:
            self.release(transfer_id)
        elif self.source.leases.find(transfer_id, self.epoch) is not None:
            self.source.leases.renew([transfer_id])
            self.renewed[transfer_id] = self.clock()

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), other=st.sampled_from([None, None, None, *DOCUMENTS]), first=st.sampled_from([0, 0, 0, 1, 2]))
    def take_over(self, data: st.DataObject, other: list[int] | None, first: int) -> None:
        """A request comes with a ticket, which may be old, and need not be for its prompt."""
        recent = list(self.tickets)[-3:]
        transfer_id = data.draw(st.sampled_from(recent))
        self.take(transfer_id, other or self.tickets[transfer_id][1], first)

    def take(self, transfer_id: bytes, document: list[int], first: int) -> None:
        ticket, _ = self.tickets[transfer_id]
        chain = PageChain(b"", SIZE)
        chain.extend(array("I", document), len(document))
        self.serials += 1
        if self.reads.start(self.serials, chain.pages[first:], first, ticket):
            self.waiting[self.serials] = self.clock()
        else:
            self.started.add(self.serials)

    @rule(turns=st.integers(1, 6))
    def poll(self, turns: int) -> None:
        """The puller's loop turns."""
        for _ in range(turns):
            self.reads.lapse()
            for serial in self.reads.poll():
                del self.waiting[serial]
                self.started.add(serial)
        late = [serial for serial, at in self.waiting.items() if self.clock() - at >= PATIENCE_SECONDS]
        assert not late, "a request waits on"

    @rule(document=st.sampled_from(DOCUMENTS), turns=st.integers(0, 12), starts=st.booleans())
    def go_all_the_way(self, document: list[int], turns: int, starts: bool) -> None:
        """The usual case in one: computed, handed off, pulled by a request that has the ticket, which starts or waits on."""
        self.hand_off(document, len(document), copied=True)
        if not self.tickets:
            return
        self.take(list(self.tickets)[-1], document, 0)
        if turns:
            self.poll(turns)
        if starts:
            self.end(self.serials)

    @precondition(lambda self: self.waiting or self.started)
    @rule(data=st.data())
    def start_or_abort(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(sorted({*self.waiting, *self.started}))))

    def end(self, serial: int) -> None:
        self.reads.arrivals.settle(serial)
        self.waiting.pop(serial, None)
        self.started.discard(serial)

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.5, 6.0]))
    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def restart_source(self) -> None:
        """Its process dies, and another comes up at the same place."""
        self.epoch += 1
        self.source = Source(self.epoch, self.clock)
        self.offered.clear()
        self.computing.clear()
        self.ended.update(self.renewed)
        self.renewed.clear()

    @rule()
    def make_room(self) -> None:
        """The puller's other requests need its host pages."""
        chain = PageChain(b"mine", SIZE)
        chain.extend(array("I", [self.chance.randrange(10**6) for _ in range(SIZE * PAGES)]), SIZE * PAGES)
        self.host.abandon(self.host.reserve(chain.pages))

    @invariant()
    def ready_pages_hold_what_they_are_called(self) -> None:
        for entry in self.host.entries():
            if entry.ready:
                assert bytes(self.pool.record(entry.page)[HEADER_BYTES:]) == content_of(entry.name)

    @invariant()
    def ledgers_agree(self) -> None:
        for host, pins in ((self.source.host, self.source.leases.pins()), (self.host, self.reads.arrivals.pins())):
            host.check()
            assert all(entry.pins == pins.get(entry.page, 0) for entry in host.entries())
        assert self.source.leases.num_pinned <= int(0.7 * PAGES)
        unready = sum(not entry.ready for entry in self.host.entries())
        assert unready == self.reads.arrivals.reading

    def teardown(self) -> None:
        """When all is over, nothing is kept."""
        self.faults = 0.0
        for serial in (*self.waiting, *self.started):
            self.reads.arrivals.settle(serial)
        for _ in range(200):
            self.reads.poll()
        self.clock.now += NEWS_SECONDS
        self.reads.lapse()
        assert not self.reads.busy and not self.reads.arrivals.pins()
        for serial in self.computing:
            self.source.leases.withdraw(serial)
        self.source.stored()
        self.source.leases.poll()
        self.clock.now += 2 * LEASE
        self.source.leases.poll()
        assert not self.source.leases.num_leases and not self.source.leases.num_pinned


def test_a_source_of_other_pages_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    reads = Handoffs().reads
    chain = PageChain(b"", SIZE)
    chain.extend(array("I", DOCUMENTS[0]), len(DOCUMENTS[0]))
    hashes = [name.key.hash for name in chain.pages]
    for serial, source in enumerate(("there:1", "there:1", "elsewhere:1")):
        other = HandoffTicket(bytes(16), source, 1, b"other", hashes, [(0, 0)] * len(hashes), 1000)
        assert not reads.start(serial, list(chain.pages), 0, other)
    assert reads.counters.fallbacks == 3
    assert [record.message.split()[2] for record in caplog.records] == ["there:1", "elsewhere:1"]


Handoffs.TestCase.settings = settings(
    max_examples=int(os.environ.get("SAPWOOD_HANDOFF_EXAMPLES", "40")), stateful_step_count=40, deadline=None
)
TestHandoffs = Handoffs.TestCase
