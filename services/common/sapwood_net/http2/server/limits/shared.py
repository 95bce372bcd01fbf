"""The resources that the connections of one server share, so that no connection takes all."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from sapwood_net.http2.server.gate import Gate
from sapwood_net.http2.server.turnstile import Turnstile
from sapwood_net.http2.wire.encoding import TooLargeError, Unfolder
from sapwood_net.pacing.body_memory import BodyMemory
from sapwood_net.pacing.heavy_work import HeavyWork
from sapwood_net.pacing.tarpit import Tarpit
from sapwood_net.pacing.time_share import TimeShare
from sapwood_net.pacing.write_batch import WriteBatch


# Unfolds large messages at the same time as everything else: 16 KB may become 16 MB, which takes 40 ms.
@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    unfolder: Unfolder
    keep: Callable[[int], None]
    done: asyncio.Future[bytes]


class Unfoldings:
    """A server's messages that wait to be decompressed: one after another, each caller's in turn, so that few are half done.

    Implements ``time_share.Worker``: however many messages wait, together they have one share of the event loop's time.

    Args:
        share: Shares it.
    """

    def __init__(self, share: TimeShare) -> None:
        self._share = share
        self._waiting: OrderedDict[Hashable, OrderedDict[_Work, None]] = OrderedDict()
        """Each caller's messages, the caller whose turn is next first. A caller without messages is not in it."""

    def is_waiting(self, caller: Hashable) -> bool:
        """Whether a message of the caller is here already."""
        return caller in self._waiting

    async def unfold(self, caller: Hashable, unfolder: Unfolder, keep: Callable[[int], None]) -> bytes:
        """The message.

        Args:
            caller: Whose it is.
            unfolder: Decompresses the message, which has begun.
            keep: Called with the number of bytes.

        Raises:
            TooLargeError, ValueError: As the unfolder does.
        """
        work = _Work(unfolder, keep, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(caller, OrderedDict())[work] = None
        self._share.add(self)
        try:
            return await work.done
        except asyncio.CancelledError:  # its message is not to be kept until its turn
            self._drop(caller, work)
            raise

    def _drop(self, caller: Hashable, work: _Work) -> None:
        works = self._waiting.get(caller)
        if works is not None:
            works.pop(work, None)
            if not works:
                del self._waiting[caller]

    def go_on(self, until: float) -> bool:
        while self._waiting and self._share.clock() < until:
            caller, works = next(iter(self._waiting.items()))
            work = next(iter(works))
            if _go_on(work):
                self._waiting.move_to_end(caller)
                self._drop(caller, work)
        return bool(self._waiting)


def _go_on(work: _Work) -> bool:
    """A step; says whether it was the last."""
    if work.done.done():  # nobody waits for it
        return True
    try:
        whole = work.unfolder.step()
    except (TooLargeError, ValueError) as error:
        work.done.set_exception(error)
        return True
    if whole is not None:
        work.done.set_result(whole)
        return True
    work.keep(work.unfolder.size)
    return False


# Bounds the calls that all connections have at a time.
MOST, MOST_UNKNOWN = 16_384, 1024
"""Calls; those of connections that have to show a key and have not yet. Beyond it each connection may have an equal share, at
least ``LEAST``: early clients do not keep late ones out."""
LEAST = 4


class StreamTotal:
    """The calls of one server, or of a part of its connections. Each takes 2 KB even if it idles, for a few bytes that its client
    sends.

    Args:
        most: How many there may be before shares count.

    Attributes:
        open: Calls that are open.
        connections: Connections that are open.
    """

    __slots__ = ("_most", "connections", "open")

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self.open = 0
        self.connections = 0

    def allows(self, own: int) -> bool:
        """Whether a connection that has ``own`` calls may have one more."""
        return self.open < self._most or own < max(LEAST, self._most // max(1, self.connections))


_STRANGERS_REST = 3.0
"""Their calls run a quarter of the time: their data waits, and so do they."""

_UNFOLDING_REST = 2.0
"""A few bytes may become 16 MB: making them has a third of the time."""


@dataclass(slots=True)
class SharedLimits:
    """The limits that all connections of one server share.

    Attributes:
        memory: Bounds what messages hold.
        time: Shares the event loop's time.
        strangers: Shares a part of it among connections that have to show a key and have not yet.
        writes: Gathers what is sent in a turn of the loop.
        breaths: Lets a few of the connections and calls that read much continue in each turn of the loop.
        exits: Lets a few cancelled calls end in each turn.
        calls: Bounds the calls of all connections.
        strangers_calls: The same of those that have to show a key and have not yet, which count there alone.
        tarpit: Where connections end whose clients broke a rule.
        heavy: Spaces out the parsing of large messages.
        unfoldings: Unfolds them before that, in a time of its own.
        gate: Says which caller a call belongs to; None: each connection is one caller.
    """

    memory: BodyMemory
    time: TimeShare = field(default_factory=TimeShare)
    strangers: TimeShare = field(default_factory=lambda: TimeShare(rest=_STRANGERS_REST))
    writes: WriteBatch = field(default_factory=WriteBatch)
    breaths: Turnstile = field(default_factory=Turnstile)
    exits: Turnstile = field(default_factory=Turnstile)
    calls: StreamTotal = field(default_factory=StreamTotal)
    strangers_calls: StreamTotal = field(default_factory=lambda: StreamTotal(MOST_UNKNOWN))
    tarpit: Tarpit = field(default_factory=Tarpit)
    heavy: HeavyWork = field(default_factory=HeavyWork)
    unfoldings: Unfoldings = field(default_factory=lambda: Unfoldings(TimeShare(rest=_UNFOLDING_REST)))
    gate: Gate | None = None

    def count_connections(self, count: int) -> None:
        """Notes how many connections are open."""
        self.calls.connections = self.strangers_calls.connections = count
