"""Gives memory that was freed back to the system: glibc keeps what lies between other things, after a flood nearly all of it.

Blocks of a megabyte and more are mapped one by one, so that each goes back when it is freed: glibc by itself would do so only
until the first was freed. Memory freed in smaller amounts is trimmed a while later.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes

_MUCH, _SOON = 32 * 1024 * 1024, 1.0
"""Bytes freed that are much, and seconds until memory is given back after much was freed."""
_SOME, _LATER = 1024 * 1024, 10.0
"""The same where less was freed: it gives back what a flood leaves behind after the last trim."""
_M_MMAP_THRESHOLD, _MAPPED = -3, 1024 * 1024


class MemoryTrim:
    """Gives memory back a second after much was freed, and ten after some was. It acts on the whole process: make one.

    Attributes:
        trims: How often memory was given back.
    """

    def __init__(self) -> None:
        self.trims = 0
        self._freed = 0
        self._timer: asyncio.TimerHandle | None = None
        self._soon = False
        """Whether the timer was set because much was freed."""
        self._ask_libc("mallopt", _M_MMAP_THRESHOLD, _MAPPED)

    @property
    def is_due(self) -> bool:
        """Whether the timer is set: memory will be given back."""
        return self._timer is not None

    def freed(self, count: int) -> None:
        """Notes that ``count`` bytes are held no more. To be called on the event loop, for large things only."""
        self._freed += count
        if self._freed >= _MUCH and not self._soon:
            if self._timer is not None:
                self._timer.cancel()
            self._soon = True
            self._timer = asyncio.get_running_loop().call_later(_SOON, self._trim)
        elif self._freed >= _SOME and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LATER, self._trim)

    def _trim(self) -> None:
        self._timer, self._soon = None, False
        self._freed = 0
        self.trims += 1
        self._ask_libc("malloc_trim", 0)

    def _ask_libc(self, function: str, *arguments: int) -> None:
        with contextlib.suppress(AttributeError, OSError):  # another C library
            ctypes.CDLL(None)[function](*arguments)
