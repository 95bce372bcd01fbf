"""What a source of pages has: in the host's memory later than on the device."""

from __future__ import annotations

import time
from array import array

import pytest

from sapwood_worker.core.cache.host import HostPages
from sapwood_worker.core.cache.page_key import PageChain
from sapwood_worker.core.cache.transfer.leases import PageSource, TransferLeases
from sapwood_worker.model.pools.host_pool import HostPool


@pytest.mark.parametrize("ends", ["copied", "lost"])
def test_who_reads_the_device_does_not_wait_for_copies_to_the_hosts_memory(ends: str) -> None:
    host = HostPages(8)
    leases = TransferLeases(host, 4, b"f" * 32, 5, ":1", 1.0, time.monotonic)
    chain = PageChain(b"", 4)
    chain.extend(array("I", range(8)), 8)
    entries = host.reserve(chain.pages)
    for entry in entries:
        entry.coming = True
    leases.offer_pages(1, chain.keys)
    [(_, ticket, complete)] = leases.poll()
    assert len(ticket.places) == 2 and not complete
    lease = leases.find(ticket.transfer_id, 5)
    assert lease is not None
    source = PageSource(leases, HostPool(8, 64), "ab" * 32)

    def state() -> list[tuple[bool, bool]]:
        return [
            (source.is_coming(lease, 0, on_device=each), source.has(lease, 0, on_device=each)) for each in (True, False)
        ]

    coming, there, gone = (True, False), (False, True), (False, False)
    assert state() == [coming, coming]
    entries[0].computed = True
    assert state() == [there, coming]
    if ends == "copied":
        host.written(entries)
        assert state() == [there, there]
    else:
        leases.lost(entries)
        assert state() == [gone, gone]
