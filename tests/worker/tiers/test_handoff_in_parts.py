"""A prompt's pages are read while the model computes it: layers are passed on before the last one is computed."""

from __future__ import annotations

import contextlib
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from sapwood_common.contract.sampling import SamplingParams
from sapwood_testing.worker.handoff.process_memory import ProcessMemory
from sapwood_testing.worker.model_scheduler import scheduler_for
from sapwood_worker.core.cache.hierarchical import HierarchicalCache
from sapwood_worker.core.cache.host import HostPages
from sapwood_worker.core.cache.storage.record import namespace_of, verify
from sapwood_worker.core.cache.transfer.cuda_ipc import CudaIpcBackend, ExportedPages
from sapwood_worker.core.cache.transfer.leases import TransferLeases
from sapwood_worker.core.cache.transfer.server import PageServer
from sapwood_worker.core.cache.transfer.tcp import SameHostBackend, SharedMemoryBackend, TcpBackend
from sapwood_worker.core.cache.transfer.transfer_backend import TransferBackend
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.model.pools.host_pool import HEADER_BYTES, HostPool
from sapwood_worker.model.pools.peer_pages import OwnPool
from sapwood_worker.records.handoff import HandoffTicket

PAGE, PAGES, CHUNK = 4, 64, 40
FINGERPRINT = bytes.fromhex(namespace_of("model"))
PROMPT = array("I", [3 + place * 7 % 90 for place in range(97)])


class Source:
    """A prefill worker around a real model, and a reader."""

    def __init__(self, runner: Any, backend: str) -> None:
        self.runner = runner
        self.into = HostPool(PAGES, runner.host_pool.page_bytes)
        self.memory = ProcessMemory()
        layers = runner._pool.layers_in_records() if backend == "cuda" else ()
        own = OwnPool(layers, self.memory, lambda: lambda: None) if layers else None
        cuda = SameHostBackend() if own is None else CudaIpcBackend(None, own)  # as tiering.py has it
        backends: dict[str, TransferBackend] = {"tcp": TcpBackend(), "shm": SharedMemoryBackend(), "cuda": cuda}
        self.backend = backends[backend]
        self.server = PageServer("127.0.0.1", 0)
        self.host = HostPages(runner.host_pool.num_pages)
        source = f"127.0.0.1:{self.server.port}"
        self.leases = TransferLeases(self.host, PAGE, FINGERPRINT, 5, source, 1.0, time.monotonic, 60.0, in_parts=2)
        tiers = HierarchicalCache(self.host, PAGES, PAGE, leases=self.leases)
        device = own and ExportedPages(own.export(), tiers.device_epoch)
        self.server.serve(self.leases, runner.host_pool, FINGERPRINT, device=device)
        self.scheduler = scheduler_for(runner.info, tiers, max_step_tokens=CHUNK)
        sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        self.scheduler.add(Request(1, "r1", PROMPT, sampling, hands_off=True))
        self.readers = ThreadPoolExecutor(4)

    def read(self, ticket: HandoffTicket) -> Future[list[bool]]:
        """Begins to read what a ticket names."""
        indices = [ticket.first_page + number for number in range(len(ticket.places))]
        return self.readers.submit(self.backend.read, ticket, indices, [self.into.record(index) for index in indices])

    def steps(self, reads: list[Future[list[bool]]]) -> HandoffTicket:
        """Computes the prompt; what is announced is read at once."""
        while True:
            for output in self.scheduler.handoffs.poll():
                assert output.ticket is not None
                if output.finish_reason:
                    return output.ticket
                reads.append(self.read(output.ticket))
            planned = self.scheduler.schedule()
            if planned.copies is not None and planned.copies.during is not None:
                planned.copies.during.take()
            for output in self.scheduler.handoffs.poll():
                assert output.ticket is not None
                reads.append(self.read(output.ticket))
            if planned:
                self.scheduler.update(self.runner.execute(planned))
            self.scheduler.check()


@pytest.fixture(params=["tcp", "shm", "cuda"])
def make_source(request: pytest.FixtureRequest, tiny_model: Any, make_runner: Any) -> Iterator[Callable[[str], Source]]:
    with contextlib.ExitStack() as stack:

        def make(name: str) -> Source:
            path = tiny_model(name).path
            runner = make_runner(
                path, page_size=PAGE, num_pages=PAGES, max_running=2, host_cache_ratio=4.0, share_host_cache=True
            )
            source = Source(runner, request.param)
            stack.callback(source.server.close)
            stack.callback(source.readers.shutdown, wait=False)
            stack.callback(lambda: source.leases.release(list(source.leases._leases)))
            return source

        yield make


def before_the_last_layer(runner: Any, do: Callable[[], None]) -> None:
    """Has something done whenever the model comes to its last layer."""
    layer = runner._model.layers[-1]
    forward = layer.forward

    def watched(*args: Any) -> Any:
        do()
        return forward(*args)

    layer.forward = watched


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_layers_are_read_before_the_last_one_of_their_chunk_is_computed(
    make_source: Callable[[str], Source], name: str, request: pytest.FixtureRequest
) -> None:
    source = make_source(name)
    parts, seen = source.backend.parts, [0]

    def wait_for_bytes() -> None:
        until = time.monotonic() + 60
        while parts.bytes <= seen[-1]:
            assert time.monotonic() < until, "nothing was read while the model computed"
            time.sleep(0.001)
        seen.append(parts.bytes)

    before_the_last_layer(source.runner, wait_for_bytes)
    reads: list[Future[list[bool]]] = []
    ticket = source.steps(reads)
    assert len(seen) == 1 + -(-len(PROMPT) // CHUNK)
    whole = len(PROMPT) // PAGE
    assert [came for read in reads for came in read.result(60)] == [True] * whole
    assert len(ticket.places) == whole
    page_bytes = source.into.page_bytes
    assert source.memory.copied == (whole * page_bytes if request.node.callspec.id == "cuda-llama" else 0)
    assert 0 < seen[-1] < whole * page_bytes
    keys = next(iter(source.leases._leases.values())).keys
    for index, (page, _) in enumerate(ticket.places):
        assert verify(source.into.record(index), keys[index], FINGERPRINT.hex())
        assert source.into.record(index)[HEADER_BYTES:] == source.runner.host_pool.record(page)[HEADER_BYTES:]
    # What was copied layer by layer is what a page holds that is copied after its step.
    source.leases.release([ticket.transfer_id])
    kept = {index: bytes(source.into.record(index)[HEADER_BYTES:]) for index in range(whole)}
    source.scheduler.flush_cache()
    source.leases.in_parts = 0
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    source.scheduler.add(Request(2, "r2", PROMPT, sampling, hands_off=True))
    del source.runner._model.layers[-1].forward
    again = source.steps([])
    while source.scheduler.has_copies:  # the ticket does not wait for these
        if planned := source.scheduler.schedule():
            source.scheduler.update(source.runner.execute(planned))
    for index, (page, _) in enumerate(again.places):
        assert kept[index] == source.runner.host_pool.record(page)[HEADER_BYTES:]


def test_of_a_step_that_fails_nothing_is_had_that_was_read_before(make_source: Callable[[str], Source]) -> None:
    source = make_source("llama")
    parts = source.backend.parts
    reached = threading.Event()

    def fail() -> None:
        until = time.monotonic() + 60
        while not parts.bytes and time.monotonic() < until:
            time.sleep(0.001)
        reached.set()
        raise RuntimeError("the device is broken")

    before_the_last_layer(source.runner, fail)
    planned = source.scheduler.schedule()
    assert planned.copies is not None and planned.copies.during is not None
    planned.copies.during.take()
    [announced] = source.scheduler.handoffs.poll()
    assert announced.ticket is not None
    read = source.read(announced.ticket)
    with pytest.raises(RuntimeError):
        source.runner.execute(planned)
    assert reached.is_set() and parts.bytes
    [output] = source.scheduler.fail_step("it failed")
    assert output.finish_reason == "error"
    while source.scheduler.has_copies:
        source.scheduler.update(source.runner.execute(source.scheduler.schedule()))
    assert read.result(60) == [False] * len(announced.ticket.places)
    source.scheduler.check()
    assert source.host.num_free == source.host.num_pages
