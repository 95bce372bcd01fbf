"""A prompt that is handed off goes from one worker's device pages into another's, past the host's memory, and its tokens are
those that one worker alone gives."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.errors import ConfigError
from sapwood_testing.worker.handoff.process_memory import ProcessMemory
from sapwood_worker.config import WorkerConfig
from sapwood_worker.core.cache.hierarchical import HierarchicalCache
from sapwood_worker.core.cache.host import HostPages
from sapwood_worker.core.cache.storage.backend import ThreadExecutor
from sapwood_worker.core.cache.storage.record import namespace_of
from sapwood_worker.core.cache.transfer.cuda_ipc import CudaIpcBackend, ExportedPages
from sapwood_worker.core.cache.transfer.leases import TransferLeases
from sapwood_worker.core.cache.transfer.reads import PageReads, ReceiveBuffer, TransferReceiver
from sapwood_worker.core.cache.transfer.server import PageServer
from sapwood_worker.core.scheduler.config import SchedulerConfig
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.scheduler import Scheduler
from sapwood_worker.core.tiering import HostGround, Tiering
from sapwood_worker.model.pools.peer_pages import OwnPool
from sapwood_worker.records.handoff import HandoffTicket
from sapwood_worker.records.output import RequestOutput
from sapwood_worker.settings import HostCache, KvTransfer

PAGE, PAGES, CONTEXT = 4, 96, 128
FINGERPRINT = bytes.fromhex(namespace_of("model"))
PROMPT = array("I", [3 + place * 7 % 90 for place in range(97)])
WHOLE = len(PROMPT) // PAGE
SAMPLING = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


class Worker:
    """A model and its scheduler; what it takes over goes to its device's pages."""

    def __init__(self, runner: Any, server: PageServer | None = None) -> None:
        self.runner, self.memory = runner, ProcessMemory()
        host, pool = HostPages(runner.host_pool.num_pages), runner.host_pool
        own = OwnPool(runner._pool.layers_in_records(), self.memory, lambda: lambda: None)
        self.leases = None
        if server is not None:
            source = f"127.0.0.1:{server.port}"
            self.leases = TransferLeases(host, PAGE, FINGERPRINT, 5, source, 1.0, time.monotonic, 60.0, in_parts=2)
        self.tiers = HierarchicalCache(host, PAGES, PAGE, leases=self.leases)
        if server is not None and self.leases is not None:
            device = ExportedPages(own.export(), self.tiers.device_epoch)
            server.serve(self.leases, pool, FINGERPRINT, device=device)
        else:
            backend, executor = CudaIpcBackend(None, own), ThreadExecutor(4)
            into_host = PageReads(
                HostGround(host, pool, FINGERPRINT, backend), FINGERPRINT, executor, 0.9, time.monotonic
            )
            receive_buffer = ReceiveBuffer(self.tiers, PAGES, pool.object_bytes, FINGERPRINT, backend)
            into_device = PageReads(receive_buffer, FINGERPRINT, executor, 0.9, time.monotonic, into_host.counters)
            self.tiers.reads = TransferReceiver(into_host, receive_buffer, into_device)
        config = SchedulerConfig(
            page_size=PAGE, num_pages=PAGES, context_length=CONTEXT, max_running=2, max_step_tokens=40
        )
        self.scheduler = Scheduler(config, self.tiers)

    def turn(self) -> list[RequestOutput]:
        """A round of its loop."""
        outputs = self.scheduler.handoffs.poll()
        planned = self.scheduler.schedule()
        if planned.copies is not None and planned.copies.during is not None:
            planned.copies.during.take()
        outputs += self.scheduler.handoffs.poll()
        if planned:
            outputs += self.scheduler.update(self.runner.execute(planned))
        self.scheduler.check()
        return outputs

    def answer(self, request: Request) -> list[int]:
        """All tokens that a request gets."""
        self.scheduler.add(request)
        tokens: list[int] = []
        until = time.monotonic() + 60
        while request.serial in self.scheduler._requests:
            assert time.monotonic() < until, "a request does not end"
            tokens += [token for output in self.turn() for token in output.token_ids]
        return tokens


@pytest.fixture
def pair(tiny_model: Any, make_runner: Any) -> Iterator[tuple[Worker, Worker]]:
    server = PageServer("127.0.0.1", 0)
    path = tiny_model("llama").path
    made = {"page_size": PAGE, "num_pages": PAGES, "max_running": 2, "host_cache_ratio": 4.0}
    yield Worker(make_runner(path, **made, share_host_cache=True), server), Worker(make_runner(path, **made))
    server.close()


def read_some(target: Worker) -> None:
    """Returns once pages have come that were announced."""
    assert target.tiers.reads is not None
    until = time.monotonic() + 60
    while not target.tiers.reads.counters.early:
        assert time.monotonic() < until, "no announced page is read"
        target.turn()


def hand_off(source: Worker, target: Worker | None = None) -> HandoffTicket:
    """Computes the prompt; the target hears of its pages as they are announced."""
    source.scheduler.add(Request(1, "r1", PROMPT, SAMPLING, hands_off=True))
    told = array("I", PROMPT)
    while True:
        for output in source.turn():
            if output.ticket is not None and output.finish_reason:
                return output.ticket
            if output.ticket is not None and target is not None:
                target.scheduler.handoffs.announced(output.ticket, told, b"")
                told = array("I")
                read_some(target)


@pytest.mark.parametrize("early", [False, True])
def test_pages_go_from_device_to_device_and_the_tokens_are_one_workers(
    pair: tuple[Worker, Worker], *, early: bool
) -> None:
    source, target = pair
    ticket = hand_off(source, target if early else None)
    page_bytes = target.runner.host_pool.page_bytes
    tokens = target.answer(Request(2, "r2", PROMPT, SAMPLING, ticket=ticket))
    assert target.memory.copied == WHOLE * page_bytes
    assert target.tiers.reads is not None
    counters = target.tiers.reads.counters
    assert (counters.pages, counters.stale, counters.failures, counters.fallbacks) == (WHOLE, 0, 0, 0)
    assert (counters.early > 0) == early
    assert target.tiers.counters.host_hits == 0 and target.scheduler.load().device_hit_tokens == WHOLE * PAGE
    assert source.leases is not None
    source.leases.release([ticket.transfer_id])
    source.scheduler.flush_cache()
    assert tokens == source.answer(Request(3, "r3", PROMPT, SAMPLING))
    # What was pulled is cached as any other prompt, and goes to the second tier as any other.
    assert target.answer(Request(4, "r4", PROMPT, SAMPLING)) == tokens
    assert target.tiers.host.num_ready >= WHOLE and target.memory.copied == WHOLE * page_bytes


def test_what_left_the_sources_device_comes_through_the_hosts_memory(pair: tuple[Worker, Worker]) -> None:
    source, target = pair
    ticket = hand_off(source)
    source.scheduler.clear_device()
    sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    for number in range(3):  # others get the pages
        source.answer(Request(10 + number, "other", array("I", [5 + number] * 120), sampling))
    tokens = target.answer(Request(2, "r2", PROMPT, SAMPLING, ticket=ticket))
    assert target.tiers.reads is not None and target.tiers.reads.counters.pages == WHOLE
    assert target.tiers.reads.counters.fallbacks == 0
    assert tokens == source.answer(Request(3, "r3", PROMPT, SAMPLING))


def test_where_requests_need_the_devices_room_pages_go_to_the_second_tier(pair: tuple[Worker, Worker]) -> None:
    source, target = pair
    ticket = hand_off(source)
    assert target.tiers.room.num_takable == PAGES - CONTEXT // PAGE  # the longest request finds room
    target.tiers.room.take(target.tiers.room.num_takable - WHOLE + 1)  # type: ignore[attr-defined]
    target.scheduler.check = lambda: None  # type: ignore[method-assign] - these pages are nobody's
    tokens = target.answer(Request(2, "r2", PROMPT, SAMPLING, ticket=ticket))
    assert target.tiers.counters.host_hits == WHOLE
    assert tokens == source.answer(Request(3, "r3", PROMPT, SAMPLING))


def test_nothing_is_written_before_steps_and_copies_are_over_that_use_a_page(pair: tuple[Worker, Worker]) -> None:
    source, target = pair
    ticket = hand_off(source)
    tiers, steps = target.tiers, target.tiers.steps
    target.scheduler.add(Request(9, "r9", array("I", [4] * 8), SAMPLING))
    target.turn()
    for holds in ({"steps": lambda: (steps()[0] + 1, 0)}, {"is_storing": lambda page: True}):
        for name, value in holds.items():
            setattr(tiers, name, value)
        if not target.scheduler._requests.get(2):
            target.scheduler.add(Request(2, "r2", PROMPT, SAMPLING, ticket=ticket))
        for _ in range(3):
            target.turn()
        time.sleep(0.05)
        assert target.memory.copied == 0 and tiers.reads is not None and tiers.reads.busy
        tiers.steps = steps
    del tiers.is_storing
    target.answer(Request(3, "r3", PROMPT, SAMPLING))
    assert target.memory.copied > 0


def test_an_aborted_request_gives_its_pages_back(pair: tuple[Worker, Worker]) -> None:
    source, target = pair
    ticket = hand_off(source)
    target.scheduler.add(Request(2, "r2", PROMPT, SAMPLING, ticket=ticket))
    target.scheduler.abort(2)
    until = time.monotonic() + 60
    while target.scheduler.has_copies:
        assert time.monotonic() < until
        target.turn()
    target.scheduler.flush_cache()
    assert target.scheduler.load().used_pages == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_without_a_gpu_refuses_the_mover_by_name(tiny_model: Any, make_runner: Any, role: str) -> None:
    path = tiny_model("llama").path
    runner = make_runner(path, page_size=PAGE, num_pages=PAGES, max_running=2, host_cache_ratio=4.0)
    config = WorkerConfig(
        model=str(path), role=role, kv_transfer=KvTransfer(backend="cuda"), host_cache=HostCache(ratio=4.0)
    )
    with pytest.raises(ConfigError, match="--kv-transfer cuda: "):
        Tiering(config, runner, runner.host_pool, 0.001)
