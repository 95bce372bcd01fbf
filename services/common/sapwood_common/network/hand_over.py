"""Gives a protocol what a socket would have given it."""

from __future__ import annotations

import asyncio
from typing import cast


def hand_over(protocol: asyncio.BaseProtocol, content: bytes) -> None:
    """Gives a protocol what has come, whichever kind it is."""
    if not isinstance(protocol, asyncio.BufferedProtocol):
        cast(asyncio.Protocol, protocol).data_received(content)
        return
    at = 0
    while at < len(content):
        memory = memoryview(protocol.get_buffer(len(content) - at))
        count = min(len(memory), len(content) - at)
        memory[:count] = content[at : at + count]
        at += count
        protocol.buffer_updated(count)
