"""Pages go from one GPU to another where both are on one host; memory of this process stands for the GPUs'."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from sapwood_testing.worker.handoff.kept_pages import BYTES, Kept
from sapwood_testing.worker.handoff.process_memory import ProcessMemory
from sapwood_worker.core.cache.transfer.cuda_ipc import CudaIpcBackend
from sapwood_worker.core.cache.transfer.transfer_backend import TransferError
from sapwood_worker.model.pools.peer_pages import PeerPool


@pytest.fixture
def on_a_gpu() -> Iterator[Kept]:
    made = Kept(backend="cuda")
    yield made
    made.server.close()


def memory_of(kept: Kept) -> ProcessMemory:
    assert isinstance(kept.backend, CudaIpcBackend) and isinstance(kept.backend._pool.memory, ProcessMemory)
    return kept.backend._pool.memory


def copied(kept: Kept) -> int:
    return memory_of(kept).copied


def test_pages_are_read_from_host_memory_if_the_gpu_has_evicted_them(on_a_gpu: Kept) -> None:
    assert None not in on_a_gpu.read([0, 1, 2])
    assert copied(on_a_gpu) == 3 * BYTES
    page, _ = on_a_gpu.leases._leases[on_a_gpu.ticket.transfer_id].entries[1].device or (0, 0)
    on_a_gpu.device_epochs[page] += 1
    on_a_gpu.device[page] = 255
    assert None not in on_a_gpu.read([0, 1, 2])
    assert copied(on_a_gpu) == 5 * BYTES


def test_a_page_of_the_gpu_that_is_given_to_another_while_it_is_read_is_not_had(
    on_a_gpu: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = PeerPool.read

    def while_others_get_it(self: PeerPool, pages: list[int], *where: Any) -> None:
        read(self, pages, *where)
        on_a_gpu.device_epochs[pages[0]] += 1

    monkeypatch.setattr(PeerPool, "read", while_others_get_it)
    assert [record is not None for record in on_a_gpu.read([3, 4])] == [False, True]
    assert on_a_gpu.to_device([4, 5], [0, 1]) == [False, True]


def test_pages_go_from_gpu_to_gpu_if_they_are_of_the_same_tokens_and_tenant(on_a_gpu: Kept) -> None:
    page, _ = on_a_gpu.leases._leases[on_a_gpu.ticket.transfer_id].entries[1].device or (0, 0)
    on_a_gpu.device_epochs[page] += 1  # is not there any more
    assert on_a_gpu.to_device([4, 1, 2, 99], [5, 0, 3, 6]) == [True, None, True, None]
    assert on_a_gpu.own[5].tolist() == [4] * BYTES and on_a_gpu.own[3].tolist() == [2] * BYTES
    assert not on_a_gpu.own[[0, 6]].any()
    assert on_a_gpu.to_device([4], [1], [bytes(32)]) == [False]
    on_a_gpu.leases.release([on_a_gpu.ticket.transfer_id])
    assert on_a_gpu.to_device([4], [1]) == [None]


def test_a_page_of_the_gpu_is_filled_from_the_hosts_memory(on_a_gpu: Kept) -> None:
    assert isinstance(on_a_gpu.backend, CudaIpcBackend)
    on_a_gpu.backend.fill([2, 4], [memoryview(bytes([value]) * BYTES) for value in (7, 9)])
    assert on_a_gpu.own[2].tolist() == [7] * BYTES and on_a_gpu.own[4].tolist() == [9] * BYTES
    assert not on_a_gpu.own[3].any()


def test_a_source_without_a_gpu_that_is_seen_from_here_is_asked_for_one_once(
    on_a_gpu: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(on_a_gpu.backend, CudaIpcBackend)
    gone = replace(on_a_gpu.ticket, transfer_id=bytes(16))
    assert on_a_gpu.backend.read_to_device(gone, [0], [0], [b""]) == [None] and on_a_gpu.backend.reaches(
        on_a_gpu.ticket
    )
    kept = Kept(backend="tcp")
    try:
        kept.backend = on_a_gpu.backend
        assert kept.backend.reaches(kept.ticket) and kept.to_device([0, 1], [0, 1]) == [None, None]
        assert not kept.backend.reaches(kept.ticket) and on_a_gpu.backend.reaches(on_a_gpu.ticket)
        monkeypatch.delattr(CudaIpcBackend, "_read")
        assert None not in kept.read([0, 1])
    finally:
        kept.server.close()


def test_copies_that_fail_are_an_error(on_a_gpu: Kept) -> None:
    memory_of(on_a_gpu).broken = True
    with pytest.raises(TransferError, match="719"):
        on_a_gpu.read([0])
    with pytest.raises(TransferError, match="719"):
        on_a_gpu.to_device([0], [0])
