"""All replicas' Detokenize calls as one: a stream goes to the replica with the fewest, and on to another when its own is lost."""

from __future__ import annotations

from collections.abc import Callable

from sapwood_common.errors import InvalidArgumentError, UnavailableError
from sapwood_router.request.output import OutputOptions
from sapwood_router.tokenizer.detokenize_session import DetokenizeSession
from sapwood_router.tokenizer.detokenize_stream import DetokenizeStream
from sapwood_router.tokenizer.replica import ABSENT, TokenizerReplica


class DetokenizePool:
    """Opens streams while the sessions of the replicas run.

    Args:
        grace: Seconds that streams wait while every replica is gone, and none says that it starts, before they fail UNAVAILABLE.
        on_lost: Called when a call is lost: the service that answers next may be another.
        absent: Whether there is to be no tokenizer.
    """

    def __init__(self, grace: float, on_lost: Callable[[], None], *, absent: bool = False) -> None:
        self._absent = absent
        self._grace = grace
        self._on_lost = on_lost
        self._sessions: dict[TokenizerReplica, DetokenizeSession] = {}

    def open(self, options: OutputOptions, *, whole: bool = False) -> DetokenizeStream:
        """A new stream, read in one piece at its end if ``whole``. The caller reads it to its end or closes it.

        Raises:
            UnavailableError: No replica is known.
            InvalidArgumentError: There is to be none.
        """
        if self._absent:
            raise InvalidArgumentError(ABSENT)
        if not self._sessions:
            raise UnavailableError("the tokenizer is not available", retry_after=1.0)
        session = min(self._sessions.values(), key=lambda session: (not session.up, session.load))
        return session.open(options, whole=whole)

    def add(self, replica: TokenizerReplica) -> DetokenizeSession:
        """There is one more replica. The caller runs its session."""
        session = self._sessions[replica] = DetokenizeSession(replica, self._grace, self._session_lost)
        return session

    def retire(self, replica: TokenizerReplica) -> None:
        """The replica gets no new streams. Those it has go to another, or finish there if none is up; then its session ends."""
        session = self._sessions.pop(replica)
        self._move(session)
        session.finish()

    def replica_changed(self, replica: TokenizerReplica) -> None:
        """The replica came or went.

        One that does not answer its checks may still hold its call. One that drains finishes the streams of its call, which
        is the best there is if no other replica can take them over.
        """
        session = self._sessions.get(replica)
        if replica.problem is None or session is None:
            return
        if not replica.answers or any(other.up for other in self._sessions.values() if other is not session):
            session.abandon(replica.problem)

    def _session_lost(self, lost: DetokenizeSession, first: bool) -> None:
        if first:
            self._on_lost()
        self._move(lost)

    def _move(self, lost: DetokenizeSession) -> None:
        others = [session for session in self._sessions.values() if session is not lost and session.up]
        if others:
            for stream in lost.hand_over():
                min(others, key=lambda session: session.load).adopt(stream)
