"""What a flood is. Each table of them (``http2_floods.py``, ...) is a list of these; ``tables.py`` joins the tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Flood:
    """One way of asking too much.

    Attributes:
        name: In tables.
        front: The port that it goes to: ``grpc`` speaks HTTP/2, ``http`` HTTP/1.1.
        chunks: What a connection sends from its first byte on, by the number of the connection; sent as fast as the socket
            takes it. A connection whose chunks are over stays open; one that the server closes is opened anew.
        reads: Whether the attacker reads what it is answered.
        pause: Seconds between two chunks.
        hang_up: Seconds after the last chunk until the attacker closes and comes again; None: it stays.
    """

    name: str
    front: Literal["grpc", "http"]
    chunks: Callable[[int], Iterator[bytes]]
    reads: bool = True
    pause: float = 0.0
    hang_up: float | None = None
