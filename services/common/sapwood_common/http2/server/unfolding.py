"""Decompresses a large message a piece at a time, beside other work: 16 KB may become 16 MB, which takes 40 ms."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from sapwood_common.http2.wire.encoding import TooLargeError, Unfolder


class Unfolding:
    """The decompression of one message. Implements ``time_share.Worker``.

    Args:
        unfolder: Decompresses the message, and has begun.
        keep: Called with the bytes that there are so far.

    Attributes:
        done: The message, or the unfolder's TooLargeError or ValueError. Cancelling it ends the work.
    """

    def __init__(self, unfolder: Unfolder, keep: Callable[[int], None]) -> None:
        self.done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._unfolder = unfolder
        self._keep = keep

    def go_on(self, until: float) -> bool:
        while not self.done.done():
            try:
                whole = self._unfolder.step()
            except (TooLargeError, ValueError) as error:
                self.done.set_exception(error)
                break
            if whole is not None:
                self.done.set_result(whole)
                break
            self._keep(self._unfolder.size)
            if time.perf_counter() >= until:
                return not self.done.done()
        return False
