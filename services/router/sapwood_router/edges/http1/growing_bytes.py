"""Bytes that grow to many megabytes and are gone at once when they are dropped."""

from __future__ import annotations

import mmap
from typing import cast

_LARGE = 128 * 1024
"""Bytes from which on they have memory of their own. malloc would put them wherever earlier requests left room between other
things, and what is freed there stays this process's until it is trimmed.
"""


class GrowingBytes:
    """Grows in place: to join 16 MB takes 10 ms."""

    __slots__ = ("_map", "_small", "size")

    def __init__(self) -> None:
        self.size = 0
        self._small = bytearray()
        self._map: mmap.mmap | None = None
        """Pages that nobody wrote to take no memory."""

    def add(self, part: bytes) -> None:
        """Adds to them. Not after :meth:`view`."""
        begin, self.size = self.size, self.size + len(part)
        if self._map is not None:
            if self.size > len(self._map):
                self._map.resize(2 * self.size)
            self._map[begin : self.size] = part
            return
        self._small += part
        if self.size > _LARGE:
            self._map = mmap.mmap(-1, 2 * self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._map[: self.size] = bytes(self._small)
            self._small = bytearray()

    def view(self) -> bytes:
        """All of them, to be sliced and decoded: a ``bytearray`` or ``memoryview`` that nobody changes any more."""
        whole = self._small if self._map is None else memoryview(self._map)[: self.size]
        return cast(bytes, whole)
