"""A backend that loses, reorders and spoils pages, while the source continues."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from sapwood_testing.worker.fake_runner import FakeRunner
from sapwood_testing.worker.handoff.simulated_worker import SimulatedWorker
from sapwood_testing.worker.handoff.world import FINGERPRINT, World
from sapwood_worker.core.cache.storage.record import header_of
from sapwood_worker.core.cache.transfer.cuda_ipc import ExportedPages
from sapwood_worker.core.cache.transfer.leases import Lease, PageSource
from sapwood_worker.core.cache.transfer.reads import DeviceTransferBackend
from sapwood_worker.core.cache.transfer.transfer_backend import PartCount, TransferError
from sapwood_worker.model.pools.host_pool import HEADER_BYTES
from sapwood_worker.records.handoff import HandoffTicket


class LossyBackend:
    """Implements :class:`~sapwood_worker.core.cache.transfer.transfer_backend.TransferBackend` on a bad day.

    Args:
        world: The simulation's facts.
        source: Returns the prefill worker of now.
        meanwhile: Called while a page is on its way, with its ticket: the source's life continues, so that its memory may go to
            somebody else. May raise TransferError.

    Attributes:
        read_late: Whether a page was given out for a lease that had ended; a backend may fail, so that nobody would hear it.
    """

    def __init__(
        self, world: World, source: Callable[[], SimulatedWorker], meanwhile: Callable[[HandoffTicket], None]
    ) -> None:
        self.read_late = False
        self.parts = PartCount()
        self._world, self._source, self._meanwhile = world, source, meanwhile

    def read(self, ticket: HandoffTicket, indices: Sequence[int], buffers: Sequence[memoryview]) -> list[bool]:
        order = list(zip(indices, buffers, range(len(indices)), strict=True))
        self._world.chance.shuffle(order)
        answers = [False] * len(order)
        for index, buffer, place in order:
            if self._world.chance.random() < self._world.faults / 3:
                buffer[: HEADER_BYTES + 1] = bytes(HEADER_BYTES + 1)
                raise TransferError("the way is cut")
            answers[place] = self._read_page(ticket, index, buffer)
        return answers

    def into(self, runner: FakeRunner) -> DeviceTransferBackend:
        """This backend for the pages of a runner's device."""
        return _LossyDevice(self, runner)

    def read_to_device(
        self, runner: FakeRunner, ticket: HandoffTicket, index: int, page: int, proof: bytes
    ) -> bool | None:
        """Copies a page of the source's device to a runner's; None: it is not there."""
        source, chance, faults = self._source(), self._world.chance, self._world.faults
        if chance.random() < faults / 3:
            raise TransferError("the way is cut")
        lease = self._ready(ticket, index, on_device=True)
        if lease is None:
            return False if self._source() is source else None
        device = ExportedPages(b"", source.tiers.device_epoch)
        place = device.place(lease, index)
        if place < 0:
            self._world.counts["left the device"] += 1
            return None
        if chance.random() < faults:
            self._meanwhile(ticket)
        half = chance.randint(0, self._world.page_size)
        runner.pages[page, :half] = source.runner.pages[place, :half]
        if chance.random() < faults:
            self._meanwhile(ticket)
        runner.pages[page, half:] = source.runner.pages[place, half:]
        leases = source.leases
        assert leases is not None
        if self._source() is not source or device.place(lease, index) != place or not leases.readable(lease, index):
            self._world.counts["stale"] += 1
            return False
        self.read_late |= leases.find(ticket.transfer_id, ticket.epoch) is not lease
        leases.was_read(lease, index)
        self._world.counts["landed"] += 1
        return proof == lease.keys[index].proof

    def _ready(self, ticket: HandoffTicket, index: int, *, on_device: bool = False) -> Lease | None:
        """The lease of a page that is there, perhaps after a while."""
        source, chance = self._source(), self._world.chance
        leases = source.leases
        assert leases is not None
        pages = PageSource(leases, source.pool, FINGERPRINT.hex())
        lease = leases.find(ticket.transfer_id, ticket.epoch)
        if lease is None or not leases.readable(lease, index):
            self._world.counts["given to another"] += lease is not None
            return None
        for _ in range(chance.randint(0, 3)):
            if pages.is_coming(lease, index, on_device=on_device):
                self._world.counts["waited for"] += 1
                self._meanwhile(ticket)
        if self._source() is not source or not pages.has(lease, index, on_device=on_device):
            return None
        self._world.counts["before the host has it"] += not lease.entries[index].ready
        return lease

    def _read_page(self, ticket: HandoffTicket, index: int, buffer: memoryview) -> bool:
        source, chance, faults = self._source(), self._world.chance, self._world.faults
        leases, lease = source.leases, self._ready(ticket, index)
        if lease is None or leases is None:
            return False
        record = source.pool.record(lease.ticket.places[index][0])
        if chance.random() < faults:
            self._meanwhile(ticket)
        sent = bytearray(header_of(record, lease.keys[index], FINGERPRINT.hex()) + record[HEADER_BYTES:])
        if chance.random() < faults:  # between what was checked and what is sent
            self._meanwhile(ticket)
        if chance.random() < faults / 3:
            place = HEADER_BYTES + chance.randrange(self._world.page_size * 8)
            sent[place] ^= 1 << chance.randrange(8)
            self._world.counts["spoilt"] += 1
        buffer[:] = sent
        if self._source() is not source or not leases.readable(lease, index):
            self._world.counts["stale"] += 1
            return False
        self.read_late |= leases.find(ticket.transfer_id, ticket.epoch) is not lease
        leases.was_read(lease, index)
        return True


class _LossyDevice:
    """Implements :class:`~sapwood_worker.core.cache.transfer.reads.DeviceTransferBackend` on a bad day."""

    def __init__(self, backend: LossyBackend, runner: FakeRunner) -> None:
        self.parts, self.read = backend.parts, backend.read
        self._backend, self._runner = backend, runner

    def reaches(self, ticket: HandoffTicket) -> bool:
        return True

    def read_to_device(
        self, ticket: HandoffTicket, indices: Sequence[int], pages: Sequence[int], proofs: Sequence[bytes]
    ) -> list[bool | None]:
        asked = zip(indices, pages, proofs, strict=True)
        return [self._backend.read_to_device(self._runner, ticket, *each) for each in asked]

    def fill(self, pages: Sequence[int], contents: Sequence[memoryview]) -> None:
        for page, content in zip(pages, contents, strict=True):
            self._runner.pages[page] = np.frombuffer(content, np.int64)

    def barrier(self) -> Callable[[], None]:
        """Waits for nothing: the scheduler's own count of steps must do."""
        return lambda: None
