"""Messages to the source about its leases, on their way; and when, after all that it was told, each lease must end."""

from __future__ import annotations

from collections.abc import Iterable

from sapwood_testing.worker.handoff.simulated_worker import SimulatedLeases, SimulatedWorker
from sapwood_testing.worker.handoff.world import World
from sapwood_worker.core.cache.transfer.leases import LEASE_SECONDS


class LeaseMessages:
    """What the router says of tickets: lost, late, or out of order.

    Args:
        world: The simulation's facts.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._messages: list[tuple[float, bool, bytes]] = []
        self._ends: dict[bytes, float] = {}

    def given(self, transfer_ids: Iterable[bytes]) -> None:
        """The source has given or extended these."""
        until = self._world.clock() + LEASE_SECONDS
        for transfer_id in transfer_ids:
            self._ends[transfer_id] = until

    def renew(self, transfer_id: bytes) -> None:
        """Tells the source that a ticket may still be needed."""
        self._say(False, transfer_id)

    def release(self, transfer_id: bytes) -> None:
        """Tells the source that it is not."""
        self._say(True, transfer_id)

    def _say(self, over: bool, transfer_id: bytes) -> None:
        chance = self._world.chance
        if chance.random() >= self._world.loss:
            self._messages.append((self._world.clock() + chance.uniform(0, 0.4), over, transfer_id))

    def forget(self, transfer_id: bytes) -> None:
        """The source has ended the lease of itself."""
        self._ends.pop(transfer_id, None)

    def forget_all(self) -> None:
        """The source was killed."""
        self._ends.clear()

    def deliver(self, source: SimulatedWorker) -> None:
        """Delivers to the source the messages whose time has come."""
        if not self._messages:
            return
        now, leases = self._world.clock(), source.leases
        assert leases is not None
        due = [message for message in self._messages if message[0] <= now]
        if due:
            self._messages = [message for message in self._messages if message[0] > now]
        for _, over, transfer_id in due:
            if over:
                self.end(source, transfer_id)
                assert leases.find(transfer_id, self._world.epoch) is None
            elif leases.find(transfer_id, self._world.epoch) is not None:
                source.scheduler.handoffs.keep([transfer_id], [])
                self.given([transfer_id])

    def end(self, source: SimulatedWorker, transfer_id: bytes) -> None:
        """The source hears that a ticket is not needed any more."""
        source.scheduler.handoffs.keep([], [transfer_id])
        self.forget(transfer_id)

    def check(self, leases: SimulatedLeases) -> None:
        """Checks that leases pin no more than their share, and that each lasts until nobody has renewed it for its time.

        Raises:
            AssertionError: Something is wrong.
        """
        for transfer_id in leases.gone:
            self.forget(transfer_id)
            self._world.counts["lost pages"] += 1
        leases.gone = ()
        if not self._ends and not leases.num_leases:
            return
        world, now = self._world, self._world.clock()
        assert leases.num_pinned <= int(world.share * world.host_pages), "leases pin more than their share"
        over = []
        for transfer_id, until in self._ends.items():
            there = leases.find(transfer_id, world.epoch) is not None
            assert there == (now < until), "a lease lasts until nobody renews it"
            if not there:
                over.append(transfer_id)
        for transfer_id in over:
            del self._ends[transfer_id]
