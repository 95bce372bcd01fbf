"""Unfolds a large message beside everything else: 16 KB may become 16 MB, which takes 40 ms."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from sapwood_common.http2.wire.encoding import TooLargeError, Unfolder


class Unfolding:
    """Works a piece at a time, in turn with others that have much to do (:class:`TimeShare`).

    Args:
        unfolder: Of the message, which has begun.
        keep: Told how many bytes there are by now.

    Attributes:
        done: The message; or TooLargeError or ValueError, as the unfolder raises them. Whoever cancels it ends the work.
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
