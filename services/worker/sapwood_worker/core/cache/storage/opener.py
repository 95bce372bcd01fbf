"""Opens stores at start-up and at run time, and measures the least number of pages that are fetched faster than computed.

Two times are measured: the seconds to compute a token, by running the model (``measure_prefill``), and the seconds that the
store takes for one test page and for several. Fetching n pages takes ``fixed + n * each``; it pays from
``n > fixed / (seconds to compute a page - each)`` on, and never if the store is slower than the model.
"""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sapwood_common.contract.sampling import SamplingParams
from sapwood_worker.core.cache.storage.backend import StorageBackend, StorageError, ThreadExecutor
from sapwood_worker.core.cache.storage.connection import NEVER, Connection
from sapwood_worker.core.cache.storage.record import page_namespace
from sapwood_worker.core.cache.storage.store_factory import parse_storage
from sapwood_worker.core.cache.storage.tier import StorageTier
from sapwood_worker.model.pools.host_pool import HEADER_BYTES, SCRATCH_PAGES, HostPool
from sapwood_worker.records.step import Entry, Runner, Step

logger = logging.getLogger(__name__)

_FIRST_RETRY, _LAST_RETRY = 1.0, 60.0
_PROBE_TOKENS = 256


@dataclass(frozen=True, slots=True)
class StorageFacts:
    """The facts about a worker that opening a store needs.

    Attributes:
        pool: The host pages.
        page_size: Tokens in a page.
        identity: Returns everything besides tokens that the content of pages depends on; may take long.
        seconds_per_token: Seconds that computing a token takes.
        min_tokens: Fewer tokens than this are not fetched; None: measured.
    """

    pool: HostPool
    page_size: int
    identity: Callable[[], str]
    seconds_per_token: float
    min_tokens: int | None


class StorageOpener:
    """Attaches stores to a tier. A store that does not answer is tried again, at growing intervals, until another store replaces
    it.

    Args:
        tier: The tier.
        facts: What it must know of the worker.
        clock: Seconds, monotonic.
    """

    def __init__(self, tier: StorageTier, facts: StorageFacts, clock: Callable[[], float] = time.monotonic) -> None:
        self._tier = tier
        self._facts = facts
        self._clock = clock
        self._executor: ThreadExecutor | None = None
        self._url = ""
        self._error = ""
        self._done: Callable[[str], None] | None = None
        self._retry_at = math.inf
        self._pause = _FIRST_RETRY

    @property
    def url(self) -> str:
        """The URL of the store that is attached or being opened; empty: none."""
        return self._url

    @property
    def error(self) -> str:
        """Why the store could not be opened; empty: it is open, or still being opened."""
        return self._error

    @property
    def opening(self) -> bool:
        """Whether a store is being opened just now."""
        return self._executor is not None

    def open(self, url: str, done: Callable[[str], None] | None = None) -> None:
        """Detaches the present store and begins to open this one; :meth:`poll` attaches it.

        Args:
            url: The store's URL, as ``factory.parse_storage`` takes it.
            done: Called in :meth:`poll` after the first attempt, with the error; empty if it succeeded.

        Raises:
            ConfigError: It is not a store's URL; nothing has changed.
        """
        parse_storage(url)
        self.close()
        self._url, self._done = url, done
        self._begin()

    def close(self) -> None:
        """Detaches the store, if there is one, or stops trying to open it."""
        self._tier.detach()
        if self._executor is not None:
            self._executor.close()
            self._executor = None
        self._url, self._error, self._retry_at, self._pause = "", "", math.inf, _FIRST_RETRY
        self._tell("another store was attached, or this one detached")

    def poll(self) -> None:
        """Attaches the store once it is open, or tries again to open it when it is time. Never blocks."""
        if self._executor is not None:
            self._executor.poll()
        elif self._clock() >= self._retry_at:
            self._begin()

    def wait(self, seconds: float) -> None:
        """Waits until the store is open or has failed to open, at most for the given seconds."""
        until = self._clock() + seconds
        while self.opening and self._clock() < until:
            if self._executor is not None:
                self._executor.wait(0.05)
            self.poll()

    def _begin(self) -> None:
        self._retry_at = math.inf
        executor = self._executor = ThreadExecutor(threads=1)
        connect = parse_storage(self._url)

        def ended(connection: Connection | None, error: Exception | None) -> None:
            if self._executor is not executor:  # another store has taken its place
                if connection is not None:
                    connection.close()
                    connection.backend.close()
                return
            self._executor = None
            executor.close()
            if connection is None:
                self._error = str(error) or type(error).__name__
                self._retry_at = self._clock() + self._pause
                logger.warning("%s: %s; trying again in %g s", self._url, self._error, self._pause)
                self._pause = min(_LAST_RETRY, 2 * self._pause)
                self._tell(self._error)
                return
            self._error, self._pause = "", _FIRST_RETRY
            tokens = connection.min_pages * self._facts.page_size
            worth = (
                "slower than computing, so nothing is read"
                if not connection.worthwhile
                else f"used from {tokens} tokens on"
            )
            logger.info("%s is the KV cache's third tier, %s", self._url, worth)
            self._tier.attach(connection)
            self._tell("")

        executor.submit(lambda: open_connection(connect(), self._facts, self._clock), ended, urgent=True)

    def _tell(self, error: str) -> None:
        done, self._done = self._done, None
        if done is not None:
            done(error)


def open_connection(backend: StorageBackend, facts: StorageFacts, clock: Callable[[], float]) -> Connection:
    """Measures an open store; returns a connection to it. Blocks.

    Raises:
        StorageError: The store does not answer.
    """
    namespace = page_namespace(facts.identity(), facts.page_size, facts.pool.object_bytes)
    try:
        backend.register(facts.pool.buffers)
        fixed, each = _measure_store(backend, facts.pool, namespace)
        store_id = _store_id(backend, facts.pool, namespace)
    except BaseException:
        backend.close()
        raise
    if facts.min_tokens is not None:
        min_pages = -(-facts.min_tokens // facts.page_size)
    else:
        min_pages = break_even(fixed, each, facts.seconds_per_token * facts.page_size)
    return Connection(backend, ThreadExecutor(), namespace, min_pages, clock, store_id)


def break_even(fixed: float, each: float, compute: float) -> int:
    """The least number of pages that are fetched faster than they are computed.

    Args:
        fixed: Seconds that any read takes.
        each: Seconds that each page adds.
        compute: Seconds to compute a page.
    """
    return NEVER if each >= compute else max(1, math.ceil(fixed / (compute - each)))


def measure_prefill(runner: Runner, page_size: int, counts: Sequence[int], most_tokens: int) -> float:
    """Seconds that computing a token of a prompt takes; runs the model twice, before any request is accepted.

    Args:
        runner: Runs it.
        page_size: Tokens in a page.
        counts: Pages of each page table.
        most_tokens: Most tokens of a step.
    """
    count = max(1, min(_PROBE_TOKENS, most_tokens, min(counts) * page_size))
    one = np.ones(1, np.int64)
    step = Step(
        number=0,
        rows=0 * one,
        starts=0 * one,
        counts=count * one,
        samples=one,
        token_ids=np.ones(count, np.int64),
        pages=np.tile(np.arange(-(-count // page_size), dtype=np.int32)[None], (1, len(counts))),
        entries=(Entry(0, -1, SamplingParams(temperature=0.0)),),
    )
    best = math.inf
    for _ in range(2):
        began = time.perf_counter()
        runner.execute(step)
        best = min(best, time.perf_counter() - began)
    return best / count


def _measure_store(backend: StorageBackend, pool: HostPool, namespace: str) -> tuple[float, float]:
    """Seconds that any read takes, and seconds that each page adds; overwrites the scratch pages."""
    records = [pool.record(pool.num_pages + index) for index in range(SCRATCH_PAGES)]
    for record in records:
        record[:HEADER_BYTES] = bytes(HEADER_BYTES)
    names = [f"{namespace}/{index:032x}" for index in range(SCRATCH_PAGES)]
    if not all(backend.put(names, records)):
        raise StorageError("the store does not take objects: it may be full")
    seconds = []
    for count in (1, 1, SCRATCH_PAGES):  # the first one opens connections and is not measured
        began = time.perf_counter()
        if not all(backend.get(names[:count], records[:count])):
            raise StorageError("the store does not give back what was written a moment ago")
        seconds.append(time.perf_counter() - began)
    each = max(0.0, (seconds[2] - seconds[1]) / (SCRATCH_PAGES - 1))
    return max(0.0, seconds[1] - each), each


def _store_id(backend: StorageBackend, pool: HostPool, namespace: str) -> str:
    """The store's id: the content of an object in it that the first worker writes. Overwrites a scratch page.

    A URL would not do: on another machine the same path may be another folder.
    """
    name, record = f"{namespace}/{SCRATCH_PAGES:032x}", pool.record(pool.num_pages)
    for _ in range(2):
        if not backend.exists([name]):
            record[:HEADER_BYTES] = uuid.uuid4().bytes.ljust(HEADER_BYTES, b"\0")
            backend.put([name], [record])  # if another worker was faster, its object stays
        if all(backend.get([name], [record])):
            return bytes(record[:16]).hex()
        backend.remove([name])  # of another size: nobody could read it
    raise StorageError("the store does not give back what was written a moment ago")
