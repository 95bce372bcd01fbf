"""What the connections of one server share, so that none takes it all."""

from __future__ import annotations

from dataclasses import dataclass, field

from sapwood_common.http2.server.limits.stream_total import StreamTotal
from sapwood_common.http2.server.turnstile import Turnstile
from sapwood_common.pacing.body_memory import BodyMemory
from sapwood_common.pacing.time_share import TimeShare


@dataclass(frozen=True, slots=True)
class SharedLimits:
    """Of one server.

    Attributes:
        memory: What messages hold.
        time: The event loop's.
        breaths: Where those wait that read much, or read many requests which are there already: a few go on in each turn.
        exits: Where calls wait that are cancelled.
        calls: How many there are.
    """

    memory: BodyMemory
    time: TimeShare = field(default_factory=TimeShare)
    breaths: Turnstile = field(default_factory=Turnstile)
    exits: Turnstile = field(default_factory=Turnstile)
    calls: StreamTotal = field(default_factory=StreamTotal)
