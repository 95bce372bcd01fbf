"""Random bytes, read from the system many at a time: a system call for a few of them takes longer than the rest of a use."""

from __future__ import annotations

import os

_BLOCK, _BLOCKS_READ = 16, 256
_blocks: list[bytes] = []
os.register_at_fork(after_in_child=_blocks.clear)


def random_bytes(count: int) -> bytes:
    """Up to 16 bytes of ``os.urandom``, for ids and seeds; what must stay secret is better read when it is needed."""
    try:
        return _blocks.pop()[:count]  # no two threads get the same one
    except IndexError:
        read = os.urandom(_BLOCK * _BLOCKS_READ)
        _blocks.extend([read[at : at + _BLOCK] for at in range(0, len(read), _BLOCK)])
        return os.urandom(count)
