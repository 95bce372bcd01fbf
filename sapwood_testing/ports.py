"""Ports for servers that go away and come back."""

from __future__ import annotations

import contextlib
import random
import socket


def port_of_its_own() -> int:
    """A free port below those that the kernel hands out: nobody takes it while its server restarts."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", random.SystemRandom().randrange(12_000, 32_000)))
            port: int = probe.getsockname()[1]
            return port
