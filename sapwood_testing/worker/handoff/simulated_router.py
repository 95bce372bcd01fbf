"""The router of the simulation: it places requests, passes on what the workers say of pages, and begins again after a loss."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from sapwood_common.contract.sampling import SamplingParams
from sapwood_testing.worker.fake_runner import continuation
from sapwood_testing.worker.handoff.lease_messages import LeaseMessages
from sapwood_testing.worker.handoff.simulated_worker import SimulatedWorker
from sapwood_testing.worker.handoff.world import STRANGERS, VOCAB, World
from sapwood_worker.core.cache.transfer.reads import PATIENCE_SECONDS
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.records.handoff import HandoffTicket
from sapwood_worker.records.output import RequestOutput

_NAMESPACES = [b"", b"", b"tenant"]


@dataclass
class _Client:
    """What is known of a request."""

    prompt: list[int]
    sampling: SamplingParams
    namespace: bytes
    expected: Iterator[int]
    received: list[int] = field(default_factory=list)
    ticket: HandoffTicket | None = None
    announced: HandoffTicket | None = None
    at: SimulatedWorker | None = None


class SimulatedRouter:
    """Clients' requests, each of which must end once, with the right tokens.

    Args:
        world: The simulation's facts.
        messages: Carries what is said of leases.
        prefill, decode: The workers of now.

    Attributes:
        prefill, decode: The arguments; set again when one is lost.
        clients: Unfinished requests, by serial.
    """

    def __init__(
        self, world: World, messages: LeaseMessages, prefill: SimulatedWorker, decode: SimulatedWorker
    ) -> None:
        self.prefill, self.decode = prefill, decode
        self.clients: dict[int, _Client] = {}
        self._world, self._messages = world, messages
        self._news: list[tuple[float, HandoffTicket, array[int], bytes]] = []
        self._waiting: dict[int, float] = {}

    def arrive(self) -> None:
        """A client comes."""
        chance, prompt = self._world.chance, self._world.prompt()
        sampling = SamplingParams(seed=chance.getrandbits(60), max_tokens=chance.choice([2, 3, 8]), ignore_eos=True)
        self._place(_Client(prompt, sampling, chance.choice(_NAMESPACES), continuation(prompt, sampling, VOCAB)))

    def _place(self, client: _Client) -> None:
        """To the decode worker with a ticket, if there is one; else to the prefill worker, or where there should be none."""
        if client.ticket is not None and client.ticket.epoch != self._world.epoch:
            client.ticket = None
        client.announced = None
        serial, known = next(self._world.serials), len(client.received)
        left = client.sampling.max_tokens - known
        hands_off = client.ticket is None and left > 1 and self._world.chance.random() < 0.9
        client.at = self.prefill if hands_off else self.decode
        request = Request(
            serial,
            f"r{serial}",
            array("I", client.prompt + client.received),
            SamplingParams(seed=client.sampling.seed, max_tokens=left, ignore_eos=True),
            client.namespace,
            output_tokens=known,
            hands_off=hands_off,
            ticket=client.ticket,
        )
        client.at.scheduler.add(request)
        self.clients[serial] = client
        if request.held:
            self._waiting[serial] = self._world.clock() + PATIENCE_SECONDS

    def abort(self) -> None:
        """A client leaves, wherever its request is."""
        if self.clients:
            serial = self._world.chance.choice(list(self.clients))
            client = self.clients.pop(serial)
            assert client.at is not None and client.at.scheduler.abort(serial)
            assert not client.at.scheduler.abort(serial)
            self._over(client)
            self._world.counts["aborted"] += 1

    def _over(self, client: _Client) -> None:
        if client.ticket is not None:
            self._messages.release(client.ticket.transfer_id)
        elif client.announced is not None:  # the source has ended it, since the request has ended there
            self._check_ended(client.announced)

    def _check_ended(self, ticket: HandoffTicket) -> None:
        assert self.prefill.leases is not None
        assert self.prefill.leases.find(ticket.transfer_id, self._world.epoch) is None
        self._messages.forget(ticket.transfer_id)

    def try_again(self) -> bool:
        """A request begins again at a decode worker that has forgotten everything; its ticket may be an old one. Returns whether
        there was one with a ticket."""
        there = [serial for serial, client in self.clients.items() if client.ticket is not None]
        if there:
            serial = self._world.chance.choice(there)
            client = self.clients.pop(serial)
            assert client.at is self.decode and self.decode.scheduler.abort(serial)
            self.decode.scheduler.flush_cache()
            self._place(client)
            self._world.counts["tried again"] += 1
        return bool(there)

    def lost(self, lost: SimulatedWorker) -> None:
        """Places again what was at a worker that was killed, once another has come up at its place."""
        again = {serial: client for serial, client in self.clients.items() if client.at is lost}
        for serial, client in again.items():
            del self.clients[serial]
            self._place(client)
        self._world.counts["lost"] += 1

    def take(self, worker: SimulatedWorker, outputs: Sequence[RequestOutput]) -> None:
        """What a worker says of its requests."""
        if worker not in (self.prefill, self.decode):
            return  # it was killed before it could say so
        for output in outputs:
            if output.serial >= STRANGERS:
                continue
            client = self.clients[output.serial]  # it has ended before, or was aborted, if it is not there
            assert client.at is worker
            assert len(output.token_ids) <= 1
            for token in output.token_ids:
                assert token == next(client.expected), "a wrong token"
                client.received.append(token)
            if output.ticket is not None and output.finish_reason is None:
                self._announce(client, output.ticket)
            elif output.finish_reason == "handoff":
                assert output.ticket is not None
                self._handed_off(output.serial, client, output.ticket)
            elif output.finish_reason is not None:
                assert output.finish_reason == "length" and len(client.received) == client.sampling.max_tokens
                del self.clients[output.serial]
                self._over(client)
                self._world.counts["finished"] += 1

    def _handed_off(self, serial: int, client: _Client, ticket: HandoffTicket) -> None:
        world, chance, before = self._world, self._world.chance, client.announced
        if before is not None and before.transfer_id == ticket.transfer_id:
            assert ticket.places[: len(before.places)] == before.places and not ticket.first_page
        del self.clients[serial]
        if chance.random() < 2 * world.aborts:  # its client has left, which the worker hears after all
            assert not self.prefill.scheduler.abort(serial)
            self._check_ended(ticket)
            world.counts["aborted with a ticket"] += 1
            return
        client.ticket = ticket if chance.random() > world.loss / 4 else None
        world.counts["tickets"] += 1
        world.counts["whole"] += len(ticket.page_hashes) == len(client.prompt) // world.page_size
        self._place(client)

    def _announce(self, client: _Client, ticket: HandoffTicket) -> None:
        """Pages can be read while the prompt is computed: the other side is told, late, out of order or not at all."""
        world = self._world
        known = client.announced if client.announced is not None else ticket
        again = known.transfer_id == ticket.transfer_id and known is not ticket
        client.announced = known.joined(ticket) if again else ticket
        assert client.announced is not ticket or not ticket.first_page
        world.counts["announced"] += 1
        prompt = array("I", [] if again else client.prompt + client.received)
        if world.chance.random() >= world.loss:
            self._news.append((world.clock() + world.chance.uniform(0, 0.06), ticket, prompt, client.namespace))

    def tell(self) -> None:
        """The decode worker hears of pages."""
        if not self._news:
            return
        now = self._world.clock()
        due = [news for news in self._news if news[0] <= now]
        self._news = [news for news in self._news if news[0] > now]
        for _, ticket, prompt, namespace in due:
            self.decode.scheduler.handoffs.announced(ticket, prompt, namespace)

    def renew(self) -> None:
        """Says of all tickets that are out that they may still be needed."""
        for client in self.clients.values():
            if (held := client.ticket or client.announced) is not None:
                self._messages.renew(held.transfer_id)

    def check_patience(self) -> None:
        """Checks that no request waits for its pages longer than it should.

        Raises:
            AssertionError: One does.
        """
        now = self._world.clock()
        for serial, request in self.decode.scheduler._requests.items():
            assert not request.held or now < self._waiting[serial], "a request waits on"
