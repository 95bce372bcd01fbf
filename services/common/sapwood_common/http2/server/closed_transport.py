"""A socket that takes everything and keeps nothing."""

from __future__ import annotations

import asyncio


class ClosedTransport(asyncio.Transport):
    """Takes the place of a closed socket, so that calls that do not know yet may go on writing."""

    def write(self, data: object) -> None:
        """Drops the data."""

    def is_closing(self) -> bool:
        """True."""
        return True

    def close(self) -> None:
        """Is closed already."""

    def abort(self) -> None:
        """Is closed already."""

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Has nothing to tell a protocol."""

    def get_write_buffer_size(self) -> int:
        """Zero bytes."""
        return 0
