"""GPUs' memory that ranks reach of each other, with a driver that lends the host's memory."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from sapwood_testing.worker.thread_ranks import ThreadGroup, run_ranks
from sapwood_worker.model.distributed.peer_all_reduce import PeerMemory

NATIVE_ATOMICS = 3


class Driver:
    """Memory of a process is known to others by a handle, and at another address there."""

    def __init__(self, native: int = 1) -> None:
        self.native = native
        self.lent: dict[bytes, int] = {}
        self._kept: list[Any] = []

    def cuMemAlloc_v2(self, address: Any, size: ctypes.c_size_t) -> int:  # noqa: N802 - the driver's names
        self._kept.append(ctypes.create_string_buffer(b"\xff" * size.value))
        address._obj.value = ctypes.addressof(self._kept[-1])
        return 0

    def cuMemsetD8_v2(self, address: ctypes.c_uint64, value: ctypes.c_ubyte, size: ctypes.c_size_t) -> int:  # noqa: N802
        ctypes.memset(address.value, value.value, size.value)
        return 0

    def cuIpcGetMemHandle(self, handle: Any, address: ctypes.c_uint64) -> int:  # noqa: N802
        name = address.value.to_bytes(8, "little") + bytes(55) + b"x"
        self.lent[name] = address.value
        ctypes.memmove(handle._obj.bytes, name, 64)
        return 0

    def cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: ctypes.c_uint) -> int:  # noqa: N802
        assert flags.value == 1, "peers are reached as need be"
        address._obj.value = self.lent[bytes(handle.bytes)]
        return 0

    def cuDeviceGetP2PAttribute(self, value: Any, attribute: int, here: int, there: int) -> int:  # noqa: N802
        assert attribute == NATIVE_ATOMICS
        assert here != there
        value._obj.value = self.native
        return 0


@pytest.fixture
def lent(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a driver in the place of CUDA's."""

    def lend(driver: Driver) -> None:
        monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)

    return lend


def reach(group: ThreadGroup) -> list[int]:
    return PeerMemory(group, 64, torch.device("cuda", group.rank)).addresses


def test_each_rank_reaches_the_others_memory_which_is_zero_at_first(lent: Any) -> None:
    driver = Driver()
    lent(driver)
    found = run_ranks(3, reach)
    assert found[0] == found[1] == found[2]
    assert set(found[0]) == set(driver.lent.values())
    assert len(set(found[0])) == 3
    assert all(ctypes.string_at(address, 64) == bytes(64) for address in found[0])


def test_gpus_that_signals_cannot_be_written_between_are_named_on_all_ranks(lent: Any) -> None:
    lent(Driver(native=0))
    with pytest.raises(RuntimeError, match="rank 0: GPUs 0 and 1 have no link that signals can be written over"):
        run_ranks(2, reach)


def test_a_rank_whose_driver_refuses_is_named_on_all_ranks(lent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(driver, "cuIpcGetMemHandle", lambda *_: 801)
    lent(driver)
    said = []

    def work(group: ThreadGroup) -> None:
        with pytest.raises(RuntimeError, match=r"^rank 0: cuIpcGetMemHandle: CUDA error 801$") as caught:
            reach(group)
        said.append(str(caught.value))

    run_ranks(2, work)
    assert len(said) == 2
