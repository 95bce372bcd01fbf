"""Gives memory that was freed back to the system: glibc keeps what lies between other things, after a flood nearly all of it.

Blocks of a megabyte and more are mapped one by one, so that each goes back when it is freed: glibc by itself would do so only
until the first was freed. What smaller ones leave is trimmed a while later.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes

_MUCH = 32 * 1024 * 1024
_DELAY = 1.0
_M_MMAP_THRESHOLD, _MAPPED = -3, 1024 * 1024


class MemoryTrim:
    """Gives memory back a second after much was freed. It acts on the whole process: make one.

    Attributes:
        trims: How often that was done.
    """

    def __init__(self) -> None:
        self.trims = 0
        self._freed = 0
        self._timer: asyncio.TimerHandle | None = None
        self._ask_libc("mallopt", _M_MMAP_THRESHOLD, _MAPPED)

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
        self._ask_libc("malloc_trim", 0)

    def _ask_libc(self, function: str, *arguments: int) -> None:
        with contextlib.suppress(AttributeError, OSError):  # another C library
            ctypes.CDLL(None)[function](*arguments)
