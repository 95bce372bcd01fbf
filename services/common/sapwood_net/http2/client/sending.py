"""Watches a connection's own sending: for how long nothing of it has arrived, by what the kernel knows.

A path may swallow all packets of one direction, or only large ones, while the peer's heartbeats still come. TCP then sends the
same bytes again and again. Linux tells how often, and what the peer has acknowledged. Where this machine itself cannot send them,
the kernel counts them as not sent, and tries again as it does where the peer has no room. A peer that lives and reads nothing is
another matter: its kernel answers, and the connection is not stuck.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from typing import Protocol

from sapwood_net.pacing.silence import Silence

STUCK_AFTER = 1.5
"""Seconds without an acknowledgement, in which the same bytes were sent again, after which a connection is of no use."""
_PROBES, _UNACKNOWLEDGED, _SENT_AGAIN, _ACKNOWLEDGED, _SIZE = 3, slice(24, 28), slice(100, 104), slice(120, 128), 128
"""Where ``tcp_info`` has ``tcpi_probes``, ``tcpi_unacked``, ``tcpi_total_retrans`` and ``tcpi_bytes_acked``; how much there is at
least. (``tcpi_retransmits`` goes back to 0 when small packets that follow arrive.)
"""
_PACKET, _UNSENT, _ROOM, _WHOLE = slice(16, 20), slice(144, 148), slice(228, 232), 232
"""``tcpi_snd_mss``, ``tcpi_notsent_bytes`` and ``tcpi_snd_wnd``, which Linux has from 5.4 on, and where that ends."""
_FAILED_PROBES = 3
"""Probes without an answer: one that the peer's kernel answers sets the count back to 0."""


class Socket(Protocol):
    """What is asked."""

    family: int

    def getsockopt(self, level: int, option: int, size: int, /) -> bytes: ...


class Sending:
    """One connection's. Call :meth:`check` at the interval.

    Args:
        sock: Its socket; None, or one that is not TCP or not Linux's: never stuck.
        interval: Seconds between calls of :meth:`check`.
        clock: Seconds, monotonic.

    Attributes:
        open: Whether bytes are on their way that were not acknowledged, as for the last check.
    """

    def __init__(self, sock: Socket | None, interval: float, clock: Callable[[], float]) -> None:
        known = sys.platform == "linux" and sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6)
        self._socket = sock if known else None
        self._silence = Silence(interval, clock)
        self._acknowledged = self._sent_again = b""
        self.open = False

    def has_arrived(self, size: int) -> bool:
        """Whether at least ``size`` bytes were acknowledged by the last check; true if they are not counted."""
        return self._socket is None or int.from_bytes(self._acknowledged, sys.byteorder) >= size

    def check(self) -> float:
        """Seconds in which nothing was acknowledged though the kernel sent it again; 0: all is well, or nothing was sent."""
        if self._socket is None:
            return 0.0
        try:
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _WHOLE)
        except OSError:  # it is closed
            self._socket = None
            return 0.0
        if len(info) < _SIZE:
            self._socket = None
            return 0.0
        held_back = _fails_to_send(info)
        self.open = held_back or any(info[_UNACKNOWLEDGED])
        if not self.open or info[_ACKNOWLEDGED] != self._acknowledged:
            self._acknowledged, self._sent_again = info[_ACKNOWLEDGED], info[_SENT_AGAIN]
            self._silence.heard()
            return 0.0
        seconds = self._silence.check()
        return seconds if held_back or (info[_SENT_AGAIN] != self._sent_again and not info[_PROBES]) else 0.0


def _fails_to_send(info: bytes) -> bool:
    """Whether there is something to send and room for it at the peer, and nothing can be sent."""
    if len(info) < _WHOLE or any(info[_UNACKNOWLEDGED]) or not any(info[_UNSENT]) or info[_PROBES] < _FAILED_PROBES:
        return False
    return int.from_bytes(info[_ROOM], sys.byteorder) >= int.from_bytes(info[_PACKET], sys.byteorder)
