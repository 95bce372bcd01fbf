"""The device pools of other processes that are open here.

Memory that somebody has open is not freed when its process ends, so that this one's successor would find too little: each pool is
closed when its process has ended and no read is under way.
"""

from __future__ import annotations

import contextlib
import select
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from sapwood_worker.model.pools.peer_pages import DeviceMemory, PeerPool

_MOST_KNOWN = 64


class NotReachedError(Exception):
    """A pool cannot be read from here, now or ever."""


@dataclass(slots=True)
class _Peer:
    pool: PeerPool
    readers: int = 0
    over: bool = False


class Peers:
    """Opens each pool once. For any thread.

    Args:
        memory: Opens them.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self._peers: dict[bytes, _Peer | None] = {}
        """Exported pool, as it is known among processes -> that pool opened here; None: it could not be opened."""

    @contextlib.contextmanager
    def reading(self, exported: bytes) -> Iterator[PeerPool]:
        """A pool, which stays open meanwhile.

        Args:
            exported: What :meth:`~sapwood_worker.model.pools.peer_pages.OwnPool.export` gave.

        Raises:
            NotReachedError: It cannot be opened.
        """
        with self._lock:
            if exported not in self._peers:
                self._peers[exported] = self._opened(exported)
            peer = self._peers[exported]
            if peer is None:
                raise NotReachedError
            peer.readers += 1
        try:
            yield peer.pool
        finally:
            with self._lock:
                peer.readers -= 1
                self._close_if_over(peer)

    def _opened(self, exported: bytes) -> _Peer | None:
        if len(self._peers) >= _MOST_KNOWN:
            self._peers = {known: peer for known, peer in self._peers.items() if peer is not None}
        try:
            peer = _Peer(PeerPool(exported, self._memory))
        except (OSError, RuntimeError, msgspec.DecodeError):
            return None
        threading.Thread(target=self._watch, args=(exported, peer), name="peer", daemon=True).start()
        return peer

    def _watch(self, exported: bytes, peer: _Peer) -> None:
        """Waits until a pool's process has ended."""
        ended = select.poll()
        ended.register(peer.pool.process, select.POLLIN)
        ended.poll()
        with self._lock:
            del self._peers[exported]
            peer.over = True
            self._close_if_over(peer)

    def _close_if_over(self, peer: _Peer) -> None:
        if peer.over and not peer.readers:
            with contextlib.suppress(RuntimeError):  # the driver has seen it end, too
                peer.pool.close()
