"""Tickets for prompts that a worker keeps for a KV transfer, as long as a request may still need them.

A worker keeps a prompt's pages under a lease, which the router renews over the worker's session while the request runs, so that
another decode worker can pull them again if the first is lost. A session that ends takes its tickets along.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sapwood.v1 import worker_pb2
from sapwood_net.sockets.unix_socket import is_unix

_RENEWALS_A_LEASE = 4


class HeldTicket:
    """A ticket whose lease is renewed until it is released or its worker is lost. Made by :class:`HeldTickets`.

    Attributes:
        message: The ticket, as the next worker takes it.
        source: Address of the worker that gave it.
    """

    def __init__(self, message: worker_pb2.HandoffTicket, source: str, holder: HeldTickets) -> None:
        self.message = message
        self.source = source
        self._holder = holder

    @property
    def good(self) -> bool:
        """Whether the worker keeps the pages, as far as is known."""
        return self._holder.has(self.message.transfer_id)

    def release(self) -> None:
        """Nobody needs the pages any more. May be called again."""
        self._holder.release(self.message.transfer_id)


class HeldTickets:
    """The tickets of one worker's session.

    Args:
        address: The worker's.
        on_due: Called when there is something to be sent.

    Attributes:
        due: Whether :meth:`put_into` would add anything.
    """

    def __init__(self, address: str, on_due: Callable[[], None]) -> None:
        self._address = address
        self._on_due = on_due
        self._held: set[bytes] = set()
        self.due = False
        self._renews = False
        self._released: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None

    def hold(self, ticket: worker_pb2.HandoffTicket) -> HeldTicket:
        """Keeps a ticket that the worker has just given; the caller releases it."""
        message = worker_pb2.HandoffTicket()
        message.CopyFrom(ticket)
        if message.source.startswith(":"):
            message.source = _host_of(self._address) + message.source
        self._held.add(message.transfer_id)
        if self._timer is None:
            self._wait(message.lease_ms / 1000 / _RENEWALS_A_LEASE)
        return HeldTicket(message, self._address, self)

    def has(self, transfer_id: bytes) -> bool:
        """Whether a ticket is held."""
        return transfer_id in self._held

    def release(self, transfer_id: bytes) -> None:
        """The worker need not keep a ticket's pages any longer."""
        if transfer_id in self._held:
            self._held.remove(transfer_id)
            self._released.append(transfer_id)
            self.due = True
            self._on_due()

    def put_into(self, message: worker_pb2.SessionRequest) -> None:
        """Adds what is due to a message."""
        if self._renews:
            message.renew_handoffs.extend(self._held)
        self.due = self._renews = False
        message.release_handoffs.extend(self._released)
        self._released.clear()

    def clear(self) -> None:
        """The session has ended: no ticket of it can be relied on."""
        self._held.clear()
        self._released.clear()
        self.due = self._renews = False

    def _wait(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._renew, seconds)

    def _renew(self, seconds: float) -> None:
        self._timer = None
        if self._held:
            self.due = self._renews = True
            self._on_due()
            self._wait(seconds)


def _host_of(address: str) -> str:
    """The host of a worker's address; its pages are read over TCP wherever it is."""
    return "127.0.0.1" if is_unix(address) else address.rpartition(":")[0]
