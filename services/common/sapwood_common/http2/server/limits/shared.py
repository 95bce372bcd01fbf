"""What the connections of one server share, so that none takes it all."""

from __future__ import annotations

from dataclasses import dataclass, field

from sapwood_common.http2.server.limits.stream_total import StreamTotal
from sapwood_common.http2.server.turnstile import Turnstile
from sapwood_common.http2.server.unfolding import Unfoldings
from sapwood_common.pacing.body_memory import BodyMemory
from sapwood_common.pacing.time_share import TimeShare


@dataclass(slots=True)
class SharedLimits:
    """The limits that all connections of one server share.

    Attributes:
        memory: Bounds what messages hold.
        time: Shares the event loop's time.
        breaths: Lets a few of the connections and calls that read much go on in each turn of the loop.
        exits: Lets a few cancelled calls end in each turn.
        calls: Bounds the calls of all connections.
    """

    memory: BodyMemory
    time: TimeShare = field(default_factory=TimeShare)
    breaths: Turnstile = field(default_factory=Turnstile)
    exits: Turnstile = field(default_factory=Turnstile)
    calls: StreamTotal = field(default_factory=StreamTotal)
    unfoldings: Unfoldings = field(init=False)

    def __post_init__(self) -> None:
        self.unfoldings = Unfoldings(self.time)
