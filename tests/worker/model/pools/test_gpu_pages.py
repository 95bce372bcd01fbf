"""On a GPU: pages reach the host's memory while a step fills them, other processes read them, and their memory is
free once their process has ended."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from sapwood_kernels.ops.factory import device_ops
from sapwood_worker.core.cache.transfer.cuda_ipc import Peers
from sapwood_worker.model.pools.device_pool import DevicePool
from sapwood_worker.model.pools.host_pool import HostPool
from sapwood_worker.model.pools.peer_pages import CudaMemory, OwnPool
from sapwood_worker.model.pools.torch_transfer import make_transfer, marked
from sapwood_worker.records.kv_layout import KVComponent, KVLayout
from sapwood_worker.records.step import Copies, PageCopy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

DEVICE = torch.device("cuda:0")
LAYOUTS = {
    "one component": KVLayout((KVComponent(tuple(range(9)), 2, 2, 64, "bfloat16"),), 16),
    "two": KVLayout((KVComponent((0, 2, 4), 2, 2, 64, "bfloat16"), KVComponent((1, 3, 5), 1, 1, 96, "bfloat16")), 16),
}
PAGES = 40
OTHER = """
import sys, torch
from sapwood_worker.model.pools.peer_pages import CudaMemory, OwnPool

memory = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device="cuda:0")
memory.view(-1, 4096)[:] = (torch.arange(len(memory) // 4096, device="cuda:0") % 251).to(torch.uint8)[:, None]
torch.cuda.synchronize()
pool = OwnPool([(memory.data_ptr(), 4096, 0)], CudaMemory(0), lambda: lambda: None)
print(pool.export().hex(), flush=True)
input()
"""


class Chosen:
    """Pages that a step fills, which are known before.

    Args:
        chosen: They.
    """

    def __init__(self, chosen: PageCopy) -> None:
        self.chosen: PageCopy | None = chosen

    def take(self) -> PageCopy | None:
        return self.chosen


def filled(layout: KVLayout) -> DevicePool:
    pool = DevicePool(layout, PAGES, DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(1)
    for pages in pool.pages.values():
        pages.view(torch.uint8).random_(generator=generator)
    return pool


@pytest.mark.parametrize("name", LAYOUTS)
def test_layers_go_to_the_hosts_memory_while_a_step_computes_the_next(name: str) -> None:
    layout = LAYOUTS[name]
    device, host = filled(layout), HostPool(PAGES, layout.page_bytes)
    transfer = make_transfer(device, host, device_ops("cuda"))
    host.content[:] = 0
    pages, places = np.array([7, 3, 4, 5, 30], np.int32), np.array([0, 9, 8, 2, 11], np.int32)
    whole, other = PageCopy(0, np.array([1], np.int32), np.array([5], np.int32)), PageCopy(1, pages, places)
    transfer.start(Copies(whole, None, False, (), Chosen(other)))
    for layer in layout.layers:
        device.await_layer(layer)
    transfer.finish()
    parts = host.parts.of(9)
    assert parts is not None
    for on_device in (True, False):
        told = 0
        while told < len(host.parts.groups):
            more = parts.beyond(told, 10.0, on_device=on_device)
            assert more > told
            told = more
    torch.cuda.synchronize()
    assert set(transfer.poll().done) == {0, 1}
    offsets = layout.offsets()
    for page, place in [*zip(pages.tolist(), places.tolist(), strict=True), (1, 5)]:
        for layer, content in device.pages.items():
            there = content[page].reshape(-1).view(torch.uint8).cpu().numpy()
            assert (host.content[place, offsets[layer] : offsets[layer] + len(there)] == there).all(), (page, layer)
    assert not host.content[[1, 3, 4, 6, 7, 10]].any()


def test_another_process_reads_pages_whose_memory_is_freed_at_the_owners_end() -> None:
    size = 4 << 30
    memory = CudaMemory(0)
    with subprocess.Popen(
        [sys.executable, "-c", OTHER, str(size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        exported = bytes.fromhex(other.stdout.readline())
        mine = torch.zeros((PAGES, 4096), dtype=torch.uint8, device=DEVICE)
        own = OwnPool([(mine.data_ptr(), 4096, 0)], memory, lambda: marked(DEVICE))
        torch.cuda.synchronize()
        peers = Peers(memory)
        with peers.reading(exported) as peer:
            peer.read([200_000, 200_001, 5], own.targets([3, 4, 9]), 0, 4096)
        assert mine[[3, 4, 9, 5], 17].tolist() == [200_000 % 251, 200_001 % 251, 5, 0]
        free, _ = torch.cuda.mem_get_info(DEVICE)
        other.kill()
    until = time.monotonic() + 30
    while torch.cuda.mem_get_info(DEVICE)[0] < free + size // 2:
        assert time.monotonic() < until, "its memory is held"
        time.sleep(0.1)
