"""What a flood is. Each table of them (``http2_floods.py``, ...) is a list of these; ``tables.py`` joins the tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

KEY = b"K" * 54
"""In what is sent: a key that is known, in place of which the attacker puts his own. As long as those of ``make_key``."""


@dataclass(frozen=True)
class Flood:
    """One way of asking too much.

    Attributes:
        name: In tables.
        front: The port that it goes to: ``grpc`` speaks HTTP/2, ``http`` HTTP/1.1; ``neighbour`` is another program's.
        chunks: What a connection sends from its first byte on, by the number of the connection; sent as fast as the socket
            takes it. A connection whose chunks are over stays open; one that the server closes is opened again.
        reads: Whether the attacker reads what it is answered.
        pause: Seconds between two chunks.
        hang_up: Seconds after the last chunk until the attacker closes and comes again; None: it stays.
        times: Connections that each of the attacker's stands for.
        keyed: Whether it shows a key that is known.
        raw: Whether it sends these very bytes where the port speaks TLS, too.
        tls: Whether it is of ports that speak TLS only.
        piece: Bytes that are written at once, over TLS each piece in a record of its own; 0: each chunk as a whole.
        changes_keys: Whether it changes keys without an end, and sends nothing else.
    """

    name: str
    front: Literal["grpc", "http", "neighbour"]
    chunks: Callable[[int], Iterator[bytes]]
    reads: bool = True
    pause: float = 0.0
    hang_up: float | None = None
    times: int = 1
    keyed: bool = False
    raw: bool = False
    tls: bool = False
    piece: int = 0
    changes_keys: bool = False
