"""What a connection holds counts, over TLS with what the connection itself takes."""

from __future__ import annotations

import pytest

from sapwood_common.errors import SapwoodError
from sapwood_net.pacing.body_memory import BodyMemory
from sapwood_router.edges.http1.held_bytes import LIGHT, HeldBytes


class Holder:
    def fail(self, error: SapwoodError) -> None:
        raise error


@pytest.mark.parametrize(("encrypted", "own"), [(False, 0), (True, 24 * 1024)])
async def test_half_a_head_counts_over_tls_with_its_connection(encrypted, own) -> None:
    bodies, holder = BodyMemory(1 << 20), Holder()
    held = HeldBytes(bodies)
    held.encrypted = encrypted
    for waiting in (LIGHT, 60_000, LIGHT + 1, 0):
        held.weigh(holder, waiting)
        assert bodies.held == (waiting + own if waiting > LIGHT else 0)
