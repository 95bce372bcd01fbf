"""All replicas' Detokenize calls as one: a stream goes to the replica with the fewest, and on to another when its own is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from sapwood_common.channel import Dialer
from sapwood_router.detokenize_session import DetokenizeSession
from sapwood_router.detokenize_stream import DetokenizeStream
from sapwood_router.output import OutputOptions
from sapwood_router.tokenizer_replica import TokenizerReplica


class DetokenizePool:
    """Opens streams while :meth:`run` runs.

    Args:
        replicas: The tokenizer's replicas.
        dialer: Connects to them.
        grace: Seconds that streams wait while every replica is gone before they fail UNAVAILABLE.
        on_lost: Called when a call is lost: the service that answers next may be another.
    """

    def __init__(
        self, replicas: Sequence[TokenizerReplica], dialer: Dialer, grace: float, on_lost: Callable[[], None]
    ) -> None:
        self._on_lost = on_lost
        self._sessions = {
            replica.address: DetokenizeSession(replica, dialer, grace, self._session_lost) for replica in replicas
        }

    def open(self, options: OutputOptions, *, whole: bool = False) -> DetokenizeStream:
        """A new stream, read in one piece at its end if ``whole``. The caller reads it to its end or closes it."""
        session = min(self._sessions.values(), key=lambda session: (not session.up, session.load))
        return session.open(options, whole=whole)

    async def run(self) -> None:
        """Keeps a call to each replica open for ever; cancel it to stop."""
        async with asyncio.TaskGroup() as group:
            for session in self._sessions.values():
                group.create_task(session.run())

    def replica_changed(self, replica: TokenizerReplica) -> None:
        """The replica came or went.

        One that does not answer its checks may still hold its call. One that drains finishes the streams of its call, which
        is the best there is if no other replica can take them over.
        """
        if replica.problem is None:
            return
        session = self._sessions[replica.address]
        if not replica.answers or any(other.up for other in self._sessions.values() if other is not session):
            session.abandon(replica.problem)

    def _session_lost(self, lost: DetokenizeSession) -> None:
        self._on_lost()
        others = [session for session in self._sessions.values() if session is not lost and session.up]
        if others:
            for stream in lost.hand_over():
                min(others, key=lambda session: session.load).adopt(stream)
