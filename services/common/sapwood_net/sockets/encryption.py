"""How a listener's connections are encrypted."""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from sapwood_net.pacing.tarpit import HELD_SECONDS


@dataclass(frozen=True, slots=True)
class Encryption:
    """TLS of a listener.

    Attributes:
        context: Its certificate, key and rules.
        handshake: Seconds for a handshake.
        shutdown: Seconds for the end of a connection.
        held: Seconds for which the connection of a client that broke a rule is held (:class:`Tarpit`).
    """

    context: ssl.SSLContext
    handshake: float
    shutdown: float
    held: float = HELD_SECONDS
