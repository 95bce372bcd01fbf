"""The scheduler process's end of the sockets between the worker's two processes."""

from __future__ import annotations

import os
from pathlib import Path

import zmq

from sapwood_worker.ipc.messages import FromScheduler, ToScheduler, encode, to_scheduler_decoder

_WAIT_MS = 500
"""The loop looks at the leases of handed-off pages at least so often."""


class OrphanedError(Exception):
    """The front is gone."""


class ZmqMailbox:
    """Implements :class:`~sapwood_worker.core.event_loop.Mailbox` over two ZeroMQ sockets.

    Args:
        folder: Where the front's sockets are.
        parent: The front's process id; waiting ends when that process is gone.
    """

    def __init__(self, folder: Path, parent: int) -> None:
        self._parent = parent
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.set_hwm(0)
        self._inbox.connect(f"ipc://{folder}/to-scheduler")
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.set_hwm(
            0
        )  # the front always reads, and merges what its clients do not: that is what bounds memory
        self._outbox.setsockopt(zmq.LINGER, 2_000)
        self._outbox.connect(f"ipc://{folder}/from-scheduler")

    def receive(self, *, wait: bool) -> list[ToScheduler]:
        """Removes and returns all messages that are there.

        Raises:
            OrphanedError: The front is gone.
        """
        if wait and not self._inbox.poll(_WAIT_MS) and os.getppid() != self._parent:
            raise OrphanedError
        messages: list[ToScheduler] = []
        while True:
            try:
                messages.append(to_scheduler_decoder.decode(self._inbox.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return messages

    def send(self, message: FromScheduler) -> None:
        self._outbox.send(encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        """Sends what is queued and closes."""
        self._inbox.close()
        self._outbox.close()
        self._context.term()
