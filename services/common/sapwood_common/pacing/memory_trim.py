"""Gives memory that was freed back to the system: glibc keeps what lies between other things, after a flood nearly all of it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes

_MUCH = 32 * 1024 * 1024
_DELAY = 1.0


class MemoryTrim:
    """Trims a second after much was freed.

    Attributes:
        trims: How often that was done.
    """

    def __init__(self) -> None:
        self.trims = 0
        self._freed = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_due(self) -> bool:
        """Whether it will trim."""
        return self._timer is not None

    def freed(self, count: int) -> None:
        """Notes that ``count`` bytes are held no more. To be called on the event loop, for large things only."""
        self._freed += count
        if self._freed >= _MUCH and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_DELAY, self._trim)

    def _trim(self) -> None:
        self._timer = None
        self._freed = 0
        self.trims += 1
        with contextlib.suppress(AttributeError, OSError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)
