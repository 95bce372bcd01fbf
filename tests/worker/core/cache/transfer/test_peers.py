"""Pools of other processes are opened once, closed when their process has ended, and copied in few pieces."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest

from sapwood_testing.worker.handoff.process_memory import ProcessMemory
from sapwood_worker.core.cache.transfer.cuda_ipc import NotReachedError, Peers
from sapwood_worker.model.pools.peer_pages import Exported, LayerPages, OwnPool, host_targets

PAGES, BYTES, LAYERS = 8, 16, 3


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def pool() -> tuple[list[np.ndarray], OwnPool]:
    """Layers of pages in this process, whose bytes tell layer and page."""
    layers = [np.zeros((PAGES, BYTES), np.uint8) for _ in range(LAYERS)]
    for number, layer in enumerate(layers):
        layer[:] = (16 * number + np.arange(PAGES))[:, None]
    places = [(layer.ctypes.data, BYTES, number * BYTES) for number, layer in enumerate(layers)]
    return layers, OwnPool(places, ProcessMemory(), lambda: lambda: None)


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def exported_of(own: OwnPool, process: int) -> bytes:
    exported = msgspec.msgpack.decode(own.export(), type=Exported)
    return msgspec.msgpack.encode(Exported((process, exported.process[1]), exported.layers))


def test_a_pool_is_closed_when_its_process_has_ended_and_nothing_reads_it(other: subprocess.Popen[bytes]) -> None:
    _, own = pool()
    exported, memory = exported_of(own, other.pid), ProcessMemory()
    peers = Peers(memory)
    with peers.reading(exported) as first, peers.reading(exported) as second:
        assert first is second and len(memory.open_now) == LAYERS
    assert len(memory.open_now) == LAYERS
    with peers.reading(exported):
        other.kill()
        other.wait()
        until(lambda: exported not in peers._peers)
        assert len(memory.open_now) == LAYERS
    assert not memory.open_now
    with pytest.raises(NotReachedError), peers.reading(exported):
        pass


def test_what_cannot_be_opened_is_closed_again_and_not_tried_twice(other: subprocess.Popen[bytes]) -> None:
    _, own = pool()
    exported, memory = exported_of(own, other.pid), ProcessMemory()
    (process, layers) = msgspec.structs.astuple(msgspec.msgpack.decode(exported, type=Exported))
    broken = msgspec.msgpack.encode(Exported(process, [*layers, LayerPages(bytes(8), 0, BYTES, 0)]))
    elsewhere = msgspec.msgpack.encode(Exported((process[0], process[1] + 1), layers))
    peers = Peers(memory)
    for unreachable in (broken, elsewhere, b"nothing", broken):
        with pytest.raises(NotReachedError), peers.reading(unreachable):
            pass
    assert not memory.open_now and peers._peers == {broken: None, elsewhere: None, b"nothing": None}


def test_pages_side_by_side_are_one_copy_of_a_layer(other: subprocess.Popen[bytes]) -> None:
    layers, own = pool()
    memory = ProcessMemory()
    into = [np.zeros((PAGES, BYTES), np.uint8) for _ in range(LAYERS)]
    targets = OwnPool(
        [(each.ctypes.data, BYTES, at * BYTES) for at, each in enumerate(into)], memory, lambda: lambda: None
    )
    with Peers(memory).reading(exported_of(own, other.pid)) as peer:
        peer.read([1, 2, 3, 6, 5], targets.targets([4, 5, 6, 7, 0]), 0, 2 * BYTES)
        for to, of in zip([4, 5, 6, 7, 0], [1, 2, 3, 6, 5], strict=True):
            assert all((into[at][to] == layers[at][of]).all() for at in range(2))
        assert not into[2].any() and not any(into[at][1:4].any() for at in range(2))
        assert (memory.copies, memory.copied) == (2 * 3, 2 * 5 * BYTES)
        host = np.zeros((2, LAYERS * BYTES), np.uint8)
        peer.read([3, 4], host_targets([each.data for each in host]), BYTES, 3 * BYTES)
        assert not host[:, :BYTES].any() and host[1].tolist() == [0] * BYTES + [20] * BYTES + [36] * BYTES
