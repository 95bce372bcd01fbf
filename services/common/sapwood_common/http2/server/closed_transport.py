"""A socket that takes everything and keeps nothing."""

from __future__ import annotations

import asyncio


class ClosedTransport(asyncio.Transport):
    """In place of a socket that is closed: calls that are not told yet may go on writing."""

    def write(self, data: object) -> None:
        """Nothing."""

    def is_closing(self) -> bool:
        """True."""
        return True

    def close(self) -> None:
        """Nothing."""

    def abort(self) -> None:
        """Nothing."""

    def get_write_buffer_size(self) -> int:
        """None."""
        return 0
