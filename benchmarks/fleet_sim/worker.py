"""A worker without a model: a true LRU cache of pages, prompts prefilled one at a time, answers decoded next to each other."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fleet_sim.events import Events

from sapwood.v1 import worker_pb2
from sapwood_common.contract.page_hash import HASH_BYTES, digest_term, hash_pages
from sapwood_router.routing.worker_view import Load

EPOCH = 1
_U64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Speed:
    """Of a worker: tokens prefilled a second, seconds a decoded token, seconds until a KV event has reached the routers."""

    prefill: float
    decode: float
    event: float


@dataclass(slots=True)
class Job:
    """A request at a worker."""

    tokens: list[int]
    hashes: list[bytes]
    answer: list[int]
    prefilled: Callable[[int], None]
    """Called with the pages that were found cached, when the first token is there."""
    finished: Callable[[], None]


class SimulatedWorker:
    """One worker; ``publish`` gets its KV events as they would be sent."""

    def __init__(self, address: str, pages: int, page_size: int, speed: Speed, events: Events) -> None:
        self.address = address
        self.busy = 0.0
        self.requests = 0
        self.publish: Callable[[str, bytes], None] | None = None
        self._pages = pages
        self._page_size = page_size
        self._speed = speed
        self._events = events
        self._cache: dict[bytes, None] = {}
        self._digest = 0
        self._seq = 0
        self._unheard: deque[bytes] = deque()
        self._queue: deque[Job] = deque()
        self._prefilling = False
        self._running = 0
        self._queued_tokens = 0

    def fill(self) -> bytes:
        """Fills the cache with pages that nobody will ask for; returns the snapshot that says so."""
        raw = os.urandom(self._pages * HASH_BYTES)
        self._cache = {raw[i : i + HASH_BYTES]: None for i in range(0, len(raw), HASH_BYTES)}
        for page in self._cache:
            self._digest ^= digest_term(page)
        message = worker_pb2.SubscribeKvEventsResponse(epoch=EPOCH, snapshot=True, digest=self._digest)
        message.events.add().all_blocks_cleared.SetInParent()
        stored = message.events.add().block_stored
        stored.medium = worker_pb2.KV_MEDIUM_GPU
        stored.block_hashes.extend(self._cache)
        return message.SerializeToString()

    def begin(self) -> None:
        """A new run: nothing runs here; the cache stays."""
        self.busy, self.requests = 0.0, 0
        self._queue.clear()
        self._prefilling, self._running, self._queued_tokens = False, 0, 0

    def take(self, job: Job) -> None:
        self.requests += 1
        self._queued_tokens += len(job.tokens)
        self._queue.append(job)
        if not self._prefilling:
            self._next()

    def load(self) -> Load:
        return Load(
            running_requests=self._running + self._prefilling,
            waiting_requests=len(self._queue),
            queued_tokens=self._queued_tokens,
            used_pages=len(self._cache),
            evictable_pages=len(self._cache),
            num_pages=self._pages,
            epoch=EPOCH,
        )

    def _next(self) -> None:
        self._prefilling = bool(self._queue)
        if not self._queue:
            return
        job = self._queue.popleft()
        held = next((i for i, page in enumerate(job.hashes) if page not in self._cache), len(job.hashes))
        seconds = max(1, len(job.tokens) - held * self._page_size) / self._speed.prefill
        self.busy += seconds
        self._events.after(seconds, lambda: self._prefilled(job, held))

    def _prefilled(self, job: Job, held: int) -> None:
        self._queued_tokens -= len(job.tokens)
        self._remember(job.hashes)
        self._running += 1
        job.prefilled(held)
        self._events.after(len(job.answer) * self._speed.decode, lambda: self._finished(job))
        self._next()

    def _finished(self, job: Job) -> None:
        self._running -= 1
        tail = job.tokens[len(job.hashes) * self._page_size :] + job.answer[:-1]
        parent = job.hashes[-1] if job.hashes else b""
        self._remember(job.hashes + hash_pages(tail, self._page_size, salt=parent))
        job.finished()

    def _remember(self, hashes: list[bytes]) -> None:
        """Touches the pages from the last to the first, so that the first are the youngest, and says what that changed."""
        cache = self._cache
        stored = [page for page in hashes if page not in cache]
        for page in reversed(hashes):
            cache.pop(page, None)
            cache[page] = None
        removed = [page for page, _ in zip(cache, range(len(cache) - self._pages), strict=False)]
        for page in removed:
            del cache[page]
        if (stored or removed) and self.publish is not None:
            self._say(stored, removed)

    def _say(self, stored: list[bytes], removed: list[bytes]) -> None:
        self._seq += 1
        for page in (*stored, *removed):
            self._digest ^= digest_term(page)
        message = worker_pb2.SubscribeKvEventsResponse(epoch=EPOCH, seq=self._seq, digest=self._digest)
        if removed:
            _add(message.events.add().block_removed, removed)
        if stored:
            _add(message.events.add().block_stored, stored)
        self._unheard.append(message.SerializeToString())
        self._events.after(self._speed.event, self._deliver)

    def _deliver(self) -> None:
        if self._unheard and self.publish is not None:
            self.publish(self.address, self._unheard.popleft())

    def end(self) -> None:
        """The run is over: what was published arrives."""
        while self._unheard:
            self._deliver()


def _add(event: worker_pb2.BlockStored | worker_pb2.BlockRemoved, hashes: Iterable[bytes]) -> None:
    event.medium = worker_pb2.KV_MEDIUM_GPU
    event.block_hashes.extend(hashes)
