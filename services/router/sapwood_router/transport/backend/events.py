"""Server-sent events out of the bytes of a backend's answer."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

from sapwood_common.errors import InternalError

_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_LONGEST_END = 4


async def event_data(pieces: AsyncIterator[bytes], most: int) -> AsyncIterator[bytes]:
    """The data of each event; what has none, such as a comment, is left out, and so is one that the end cuts off.

    Args:
        pieces: The answer's bytes.
        most: Bytes of the longest event.

    Raises:
        InternalError: One is longer.
    """
    rest = bytearray()
    async for piece in pieces:
        seen = max(0, len(rest) - _LONGEST_END + 1)  # what came before has no end in it: it is not searched again
        rest += piece
        while (end := _END.search(rest, seen)) is not None:
            event, seen = bytes(rest[: end.start()]), 0
            del rest[: end.end()]
            lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
            if lines:
                yield b"\n".join(lines)
        if len(rest) > most:
            raise InternalError(f"the backend sent an event of more than {most} bytes")
