"""What the connections of one server share, so that none takes it all."""

from __future__ import annotations

from dataclasses import dataclass, field

from sapwood_common.http2.server.gate import Gate
from sapwood_common.http2.server.limits.stream_total import MOST_UNKNOWN, StreamTotal
from sapwood_common.http2.server.turnstile import Turnstile
from sapwood_common.http2.server.unfolding import Unfoldings
from sapwood_common.pacing.body_memory import BodyMemory
from sapwood_common.pacing.heavy_work import HeavyWork
from sapwood_common.pacing.tarpit import Tarpit
from sapwood_common.pacing.time_share import TimeShare
from sapwood_common.pacing.write_batch import WriteBatch

_STRANGERS_REST = 3.0
"""They work a quarter of the time: what they send waits, and they with it."""

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
        breaths: Lets a few of the connections and calls that read much go on in each turn of the loop.
        exits: Lets a few cancelled calls end in each turn.
        calls: Bounds the calls of all connections.
        strangers_calls: The same of those that have to show a key and have not yet, which count there alone.
        tarpit: Where connections end whose clients broke a rule.
        heavy: Spaces out the parsing of large messages.
        unfoldings: Unfolds them before that, in a time of its own.
        gate: Says whose calls are whose; None: each connection's are somebody's.
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
