"""A store whose calls do not come back: what waits for it, what it keeps, and what happens when it wakes up."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence

import pytest

from sapwood_testing.worker.storage.fake_storage import FakeStorage
from sapwood_worker.core.cache.host import HostPages
from sapwood_worker.core.cache.page_key import PageChain, PageName
from sapwood_worker.core.cache.storage.backend import ThreadExecutor
from sapwood_worker.core.cache.storage.connection import CALL_SECONDS, Connection
from sapwood_worker.core.cache.storage.record import namespace_of, object_name, seal
from sapwood_worker.core.cache.storage.tier import PrefetchOptions, StorageTier
from sapwood_worker.model.pools.host_pool import HostPool

SPACE = namespace_of("model", 4)


class StuckStorage(FakeStorage):
    """Its calls of one kind do not come back before ``gate`` is set."""

    def __init__(self, kind: str) -> None:
        super().__init__({})
        self.gate = threading.Event()
        self.began = threading.Semaphore(0)
        self._kind = kind

    def exists(self, names: Sequence[str]) -> int:
        self._wait("exists")
        return super().exists(names)

    def get(self, names: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        self._wait("get")
        return super().get(names, buffers)

    def _wait(self, kind: str) -> None:
        if kind == self._kind:
            self.began.release()
            self.gate.wait()


def document(number: int) -> list[PageName]:
    chain = PageChain(b"", 4)
    chain.extend(array("I", [number] * 8), 8)
    return chain.pages


@pytest.mark.parametrize("kind", ["exists", "get"])
def test_a_hanging_store_delays_no_request_and_returns_its_pages_later(kind: str) -> None:
    now = 0.0
    pool, host = HostPool(8, 64), HostPages(8)
    tier = StorageTier(host, pool, 4, PrefetchOptions(policy="wait_complete", share=1.0), lambda: now)
    store = StuckStorage(kind)
    for number in range(3):
        for name in document(number):
            seal(pool.record(0), name.key, SPACE)
            store.objects[object_name(SPACE, name.key)] = bytes(pool.record(0))
    connection = Connection(store, ThreadExecutor(), SPACE, 1, lambda: now)
    tier.attach(connection)
    for serial in range(3):
        assert tier.prefetch(serial, document(serial))
    begun = 0
    while begun < 3:
        tier.wait(0.01)
        assert tier.poll() == []
        begun += store.began.acquire(blocking=False)
    assert host.num_free == (8 if kind == "exists" else 2)

    now += CALL_SECONDS + 1
    assert sorted(tier.poll()) == [0, 1, 2], "nobody waits for a store that does not answer"
    assert (connection.failures, connection.breaker.is_open, tier.counters.timeouts) == (3, True, 3)
    assert not tier.prefetch(3, document(3)) and tier.counters.skipped == 1
    assert not tier.busy, "the loop need not wait for it either"
    for serial in range(3):  # the requests go their way; the store may still write to the pages it was given
        tier.arrivals.settle(serial)
    assert host.num_free == (8 if kind == "exists" else 2)

    store.gate.set()
    while connection.pending:
        connection.wait(0.01)
        tier.poll()
    assert not connection.breaker.is_open
    host.check()
    tier.check()
    assert host.num_ready == (0 if kind == "exists" else 6), "what arrived after all is there for the next"
    host.clear()
    assert host.num_free == 8
    tier.detach()
    while tier.busy:
        tier.poll()
