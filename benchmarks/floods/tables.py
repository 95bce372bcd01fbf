"""All floods."""

from __future__ import annotations

import itertools

from floods.combined_floods import COMBINED_FLOODS
from floods.flood import Flood
from floods.http1_floods import HTTP1_FLOODS
from floods.http2_floods import HTTP2_FLOODS
from floods.idle_floods import IDLE_FLOODS
from floods.keyed_floods import KEYED_FLOODS
from floods.more_floods import MORE_FLOODS
from floods.tls_floods import TLS_FLOODS

CONTROLS = (
    Flood("control: a stream to another program", "neighbour", lambda _: itertools.repeat(bytes(64 * 1024)), raw=True),
    Flood("control: small writes to another program", "neighbour", lambda _: itertools.repeat(bytes(64)), raw=True),
    Flood(
        "control: connections to another program",
        "neighbour",
        lambda _: iter((bytes(64),)),
        hang_up=0.0,
        raw=True,
    ),
)
"""What an attacker costs who does not touch the server."""
TABLES: dict[str, tuple[Flood, ...]] = {
    "controls": CONTROLS,
    "http2": HTTP2_FLOODS,
    "http1": HTTP1_FLOODS,
    "tls": TLS_FLOODS,
    "idle": IDLE_FLOODS,
    "keyed": KEYED_FLOODS,
    "more": MORE_FLOODS,
    "combined": COMBINED_FLOODS,
}
FLOODS: tuple[Flood, ...] = tuple(flood for table in TABLES.values() for flood in table)
