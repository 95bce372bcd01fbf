"""The exact index follows a worker's events: against the worker's own bookkeeping, over lost, reordered and corrupt messages,
and from a real worker's process."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import sys
import time

import pytest

from sapwood.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from sapwood_common.contract.page_hash import hash_pages
from sapwood_common.errors import ConfigError, UnimplementedError
from sapwood_common.network.channel import Dialer, open_channel
from sapwood_router.fleet.circuit_breaker import BreakerSettings, CircuitBreaker
from sapwood_router.fleet.convert import load_of
from sapwood_router.fleet.kv_event_monitor import DriftError, KvEventFollower, KvEventMonitor
from sapwood_router.fleet.served_model import ServedModel
from sapwood_router.fleet.worker import Worker
from sapwood_router.routing.index.blocks import BlockIndex, Tier
from sapwood_router.routing.worker_view import Load
from sapwood_testing.router.fake_worker import FakeWorker
from sapwood_worker.front.convert import to_kv_events
from sapwood_worker.front.kv_event_stream import KvEventBatch, KvEventStream
from sapwood_worker.records.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Medium

TIERS = {"GPU": Tier.GPU, "CPU_TIER1": Tier.HOST, "CPU_TIER2": Tier.REMOTE}


class Publisher:
    """A worker's stream fed with random changes; keeps what is cached, and every message."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.stream = KvEventStream()
        self.sent: list[KvEventBatch] = []
        self.stream.listen(self.sent.append)
        self.held: dict[Medium, set[bytes]] = {"GPU": set(), "CPU_TIER1": set(), "CPU_TIER2": set()}
        self.stream.begin(7)

    def change(self) -> None:
        medium: Medium = self._rng.choice(["GPU", "CPU_TIER1", "CPU_TIER2"])
        held = self.held[medium]
        if held and self._rng.random() < 0.4:
            gone = self._rng.sample(sorted(held), self._rng.randint(1, len(held)))
            held.difference_update(gone)
            self.stream.apply([BlockRemoved(b"".join(gone), medium)])
        elif self._rng.random() < 0.02:
            for each in self.held.values():
                each.clear()
            self.stream.apply([AllBlocksCleared()])
        else:
            new = [page for page in (self._rng.randbytes(16) for _ in range(3)) if page not in held]
            held.update(new)
            self.stream.apply([BlockStored(b"".join(new), b"", b"\0" * 4 * len(new), medium=medium)])

    def snapshot(self) -> list[worker_pb2.SubscribeKvEventsResponse]:
        return [to_kv_events(part, 1, token_ids=False) for part in self.stream.snapshot()]

    def messages(self, start: int) -> list[worker_pb2.SubscribeKvEventsResponse]:
        return [to_kv_events(batch, 1, token_ids=False) for batch in self.sent[start:]]

    def load(self) -> Load:
        return Load(epoch=self.stream.epoch, kv_seq=self.stream.seq, kv_digest=self.stream.digest)


def is_true(index: BlockIndex, publisher: Publisher) -> bool:
    return all(index.pages("w", TIERS[medium]) == held for medium, held in publisher.held.items())


@pytest.mark.parametrize("seed", range(5))
def test_a_snapshot_and_the_changes_after_it_make_the_index_true(seed: int):
    publisher, index = Publisher(seed), BlockIndex(1 << 24)
    for _ in range(50):
        publisher.change()
    follower = KvEventFollower("w", index)
    for message in publisher.snapshot():
        follower.apply(message)
    assert is_true(index, publisher)
    assert follower.agrees(publisher.load())
    at = len(publisher.sent)
    for _ in range(200):
        publisher.change()
    for message in publisher.messages(at):
        follower.apply(message)
    assert is_true(index, publisher)
    assert follower.agrees(publisher.load())


@pytest.mark.parametrize("damage", ["lost", "reordered", "corrupt"])
def test_what_is_damaged_on_the_way_is_noticed_at_once(damage: str):
    publisher, index = Publisher(1), BlockIndex(1 << 24)
    follower = KvEventFollower("w", index)
    for message in publisher.snapshot():
        follower.apply(message)
    at = len(publisher.sent)
    for _ in range(10):
        publisher.change()
    messages = publisher.messages(at)
    if damage == "lost":
        del messages[4]
    elif damage == "reordered":
        messages[4], messages[5] = messages[5], messages[4]
    else:
        messages[4].events[0].Clear()
    with pytest.raises(DriftError):
        for message in messages:
            follower.apply(message)


def test_a_silent_stream_is_told_from_an_old_report():
    publisher, index = Publisher(2), BlockIndex(1 << 24)
    before = publisher.load()
    publisher.change()
    follower = KvEventFollower("w", index)
    assert follower.agrees(publisher.load())  # nothing has been heard yet
    for message in publisher.snapshot():
        follower.apply(message)
    assert follower.agrees(before)
    publisher.change()
    assert not follower.agrees(publisher.load())


def test_a_scheduler_started_again_behind_the_same_front_holds_nothing():
    publisher, index = Publisher(3), BlockIndex(1 << 24)
    for _ in range(5):
        publisher.change()
    follower = KvEventFollower("w", index)
    for message in publisher.snapshot():
        follower.apply(message)
    at = len(publisher.sent)
    publisher.stream.begin(8)
    for message in publisher.messages(at):
        follower.apply(message)
    assert index.knows("w")
    assert not any(index.pages("w", tier) for tier in Tier)
    assert follower.agrees(publisher.load())


@contextlib.asynccontextmanager
async def worker_process(*flags: str):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sapwood_testing.worker.fake_worker", "--port", "0", "--step-ms", "0", *flags),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(60):
            while not (
                found := re.search(r"listening on (\S+:\d+)", line := (await process.stderr.readline()).decode())
            ):
                assert line, "it ended"
        reading = asyncio.ensure_future(process.stderr.read())
        yield found[1]
        process.kill()
        await reading
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def until(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.02)


async def test_a_worker_process_is_followed_through_its_tiers_and_a_drift_is_repaired(tmp_path):
    tiers = ("--host-cache-ratio", "2", "--storage", f"file://{tmp_path}", "--storage-min-tokens", "16")
    async with worker_process(*tiers) as address, open_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        index, drifts = BlockIndex(1 << 24), []
        worker = Worker(address, CircuitBreaker(BreakerSettings(), time.monotonic), time.monotonic)
        monitor = asyncio.create_task(KvEventMonitor(worker, index, Dialer(), lambda: drifts.append(1)).run())
        page_size = (await stub.GetModelInfo(worker_pb2.GetModelInfoRequest())).page_size
        prompt = list(range(1, 6 * page_size))

        async def generate(tokens: list[int]) -> None:
            request = worker_pb2.WorkerGenerateRequest(
                request_id=str(tokens[0]), token_ids=tokens, sampling=common_pb2.SamplingParams(max_tokens=2)
            )
            async for _ in stub.Generate(request):
                pass

        await generate(prompt)
        hashes = hash_pages(prompt, page_size)
        assert len(hashes) == 5
        await until(lambda: index.overlaps(hashes) == {address: (5, 5.0)})

        # Something is lost unseen: the index lacks a page's worth of truth, and the reports show a state never heard of.
        worker.report(Load(epoch=worker.load.epoch, kv_seq=10**6, kv_digest=1))
        report = await anext(aiter(stub.WatchLoad(worker_pb2.WatchLoadRequest())))
        worker.report(Load(epoch=report.load.epoch, kv_seq=10**6, kv_digest=1))
        await until(lambda: bool(drifts))
        worker.report(load_of(report.load))
        await until(lambda: index.overlaps(hashes) == {address: (5, 5.0)})

        # Each tier counts for what it saves, the nearest first; what has come down stays known when it leaves the tier above.
        for tier in (Tier.HOST, Tier.REMOTE):
            await until(lambda tier=tier: index.pages(address, tier) >= set(hashes))
        for emptied, left in (
            (worker_pb2.CACHE_TIER_DEVICE, 4.0),
            (worker_pb2.CACHE_TIER_HOST, 2.0),
            (worker_pb2.CACHE_TIER_STORAGE, None),
        ):
            await stub.ClearCache(worker_pb2.ClearCacheRequest(tiers=[emptied]))
            expected = {} if left is None else {address: (5, pytest.approx(left))}
            await until(lambda expected=expected: index.overlaps(hashes) == expected)
        monitor.cancel()
        await asyncio.wait([monitor])
        assert not index.knows(address)


class FirstFails(Dialer):
    """Its files are half written when the first channel is opened."""

    opened = 0

    def open(self, address):
        self.opened += 1
        if self.opened == 1:
            raise ConfigError("half written")
        return super().open(address)


class LateTeller(FakeWorker):
    """Publishes no events before it is started again."""

    nonsense = False

    async def SubscribeKvEvents(self, request, context):  # noqa: N802
        if self.epoch == self.first:
            raise UnimplementedError("this worker publishes no KV events")
        if self.nonsense:
            self.nonsense = False
            event = worker_pb2.KvEvent(block_stored=worker_pb2.BlockStored(block_hashes=[b"p" * 16], medium=1))
            yield worker_pb2.SubscribeKvEventsResponse(snapshot=True, epoch=1, seq=1, events=[event])
        yield worker_pb2.SubscribeKvEventsResponse(
            snapshot=True, epoch=1, seq=1, events=[worker_pb2.KvEvent(all_blocks_cleared={})]
        )
        await asyncio.Event().wait()


async def test_half_written_files_nonsense_and_older_versions_end_no_engine_for_ever():
    fake = LateTeller()
    fake.first, fake.nonsense = fake.epoch, True
    await fake.start()
    worker, index = (
        Worker(fake.address, CircuitBreaker(BreakerSettings(), time.monotonic), time.monotonic),
        BlockIndex(1000),
    )
    worker.model = ServedModel("fake", 100, 10, 4, 10, epoch=fake.epoch)
    monitor = asyncio.create_task(KvEventMonitor(worker, index, FirstFails()).run())
    try:
        await asyncio.sleep(1.5)
        assert not index.knows(fake.address)
        await fake.kill()
        await fake.start()
        worker.model = ServedModel("fake", 100, 10, 4, 10, epoch=fake.epoch)
        await until(lambda: not fake.nonsense and index.knows(fake.address))
        assert not monitor.done()
    finally:
        monitor.cancel()
        await asyncio.wait([monitor])
        await fake.kill()
