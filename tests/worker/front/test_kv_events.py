"""KV events: a subscriber that knows only their public documentation holds the same tree as the worker."""

from __future__ import annotations

import asyncio
import random
import re
from array import array
from functools import reduce
from operator import xor
from typing import Any

import grpc
import msgspec
import pytest
import zmq
import zmq.asyncio

from sapwood.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from sapwood_common.contract.page_hash import cache_namespace, digest_term, hash_pages
from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.errors import ConfigError
from sapwood_testing.worker.fake_runner import FakeRunner
from sapwood_worker.core.scheduler.config import SchedulerConfig
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.scheduler import Scheduler
from sapwood_worker.front.kv_event_publisher import KvEventPublisher, encode_batch
from sapwood_worker.front.kv_event_stream import MOST_BEHIND, SNAPSHOT_BLOCKS, KvEventBatch, KvEventStream
from sapwood_worker.records.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, split_hashes
from sapwood_worker.records.model_info import ModelInfo
from sapwood_worker.settings import KvEventsFormat


class MapStored(msgspec.Struct, tag="BlockStored", forbid_unknown_fields=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class MapRemoved(msgspec.Struct, tag="BlockRemoved", forbid_unknown_fields=True):
    block_hashes: list[int]
    medium: str | None


class MapCleared(msgspec.Struct, tag="AllBlocksCleared", forbid_unknown_fields=True):
    pass


class ArrayStored(msgspec.Struct, array_like=True, tag="BlockStored"):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None


class ArrayRemoved(msgspec.Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None = None


class ArrayCleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    pass


FORMATS: dict[KvEventsFormat, Any] = {
    "map": MapStored | MapRemoved | MapCleared,
    "array": ArrayStored | ArrayRemoved | ArrayCleared,
}
SHARED_MEDIA = ("GPU", "CPU_PINNED", "EXTERNAL")


class SharedBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class DocumentedSubscriber:
    """Written from vLLM's documentation of its KV events: tagged msgpack maps, or arrays as earlier; hashes as numbers."""

    def __init__(self, form: KvEventsFormat = "map", rank: int = 0) -> None:
        self._rank = rank
        self._decoder = msgspec.msgpack.Decoder(list[FORMATS[form]])
        self.blocks: dict[tuple[str | None, int], tuple[int | None, tuple[int, ...], str | None]] = {}

    def receive(self, payload: bytes) -> None:
        batch = msgspec.msgpack.decode(payload, type=SharedBatch)
        assert batch.data_parallel_rank == self._rank
        for event in self._decoder.decode(msgspec.msgpack.encode(batch.events)):
            match event:
                case MapStored() | ArrayStored():
                    parent = event.parent_block_hash
                    assert len(event.token_ids) == event.block_size * len(event.block_hashes)
                    for index, block in enumerate(event.block_hashes):
                        assert parent is None or (event.medium, parent) in self.blocks, "stored before its parent"
                        tokens = event.token_ids[index * event.block_size : (index + 1) * event.block_size]
                        assert (event.medium, block) not in self.blocks, "stored twice"
                        self.blocks[event.medium, block] = (parent, tuple(tokens), event.lora_name)
                        parent = block
                case MapRemoved() | ArrayRemoved():
                    for block in event.block_hashes:
                        del self.blocks[event.medium, block]
                case _:
                    self.blocks.clear()

    def sequences(self) -> set[tuple[int, ...]]:
        """The tokens from the start to each block."""
        found = set()
        for (medium, _), (parent, tokens, _) in self.blocks.items():
            while parent is not None:
                parent, above, _ = self.blocks[medium, parent]
                tokens = above + tokens
            found.add(tokens)
        return found


class Traffic:
    """A scheduler under random traffic; what it caches is read off its tree."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.page_size = self.chance.choice([1, 2, 4])
        pages = self.chance.randint(40 // self.page_size, 160 // self.page_size)
        self.scheduler = Scheduler(
            SchedulerConfig(
                page_size=self.page_size,
                num_pages=pages,
                context_length=40,
                max_running=4,
                max_step_tokens=self.chance.choice([4, 64]),
                eviction=self.chance.choice(["lru", "lfu", "fifo", "slru"]),
                kv_events=True,
            )
        )
        info = ModelInfo(
            architecture="fake",
            dtype="none",
            context_length=40,
            vocab_size=9,
            eos_token_ids=(),
            page_size=self.page_size,
            num_pages=pages,
        )
        self.runner = FakeRunner(info)
        self.documents = [[self.chance.randrange(9) for _ in range(24)] for _ in range(4)]
        self.serial = 0
        self.flushed = False

    def step(self) -> None:
        if self.chance.random() < 0.5:
            document = self.chance.choice(self.documents)
            prompt = [*document[: self.chance.randint(1, 24)], self.chance.randrange(9)]
            namespace = self.chance.choice([b"", b"", cache_namespace("salt"), cache_namespace("", "poet")])
            sampling = SamplingParams(max_tokens=self.chance.randint(1, 12))
            self.scheduler.add(Request(self.serial, f"r{self.serial}", prompt, sampling, namespace))
            self.serial += 1
        self.flushed = self.chance.random() < 0.01
        if self.flushed:
            self.scheduler.flush_cache()
        planned = self.scheduler.schedule()
        if planned:
            self.scheduler.update(self.runner.execute(planned))

    def cached(self) -> dict[bytes, tuple[int, ...]]:
        """Hash and tokens from the start of every block in the tree."""
        found: dict[bytes, tuple[int, ...]] = {}
        for node in self.scheduler._cache._tree.nodes():
            tokens, above = array("I", node.key), node.parent
            while above is not None and above.parent is not None:
                tokens, above = array("I", above.key) + tokens, above.parent
            assert above is not None
            end = len(tokens) - len(node.pages) * self.page_size
            for index, block in enumerate(split_hashes(node.hashes)):
                until = tokens[: end + (index + 1) * self.page_size]
                assert hash_pages(until, self.page_size, salt=above.key)[-1] == block
                found[block] = tuple(until)
        return found


def number(block: bytes) -> int:
    return int.from_bytes(block[-8:], "big")


@pytest.mark.parametrize("seed", range(12))
def test_a_documented_subscriber_rebuilds_the_tree_exactly(seed: int) -> None:
    form: KvEventsFormat = "map" if seed % 3 else "array"
    traffic, subscriber, stream = Traffic(seed), DocumentedSubscriber(form), KvEventStream()
    stream.begin(1)
    loras = set()
    for _ in range(300):
        traffic.step()
        events = traffic.scheduler.take_kv_events()
        assert traffic.flushed or AllBlocksCleared() not in events
        stream.apply(events)
        subscriber.receive(encode_batch(0.0, events, traffic.page_size, 0, form))
        cached = traffic.cached()
        assert {block for _, block in subscriber.blocks} == {number(block) for block in cached}
        assert subscriber.sequences() == set(cached.values())
        assert {medium for medium, _ in subscriber.blocks} <= {"GPU"}
        assert stream.num_blocks == len(cached)
        assert stream.digest == reduce(xor, map(digest_term, cached), 0)
        loras |= {lora for _, _, lora in subscriber.blocks.values()}
        late = DocumentedSubscriber(form)
        for part in stream.snapshot():
            late.receive(encode_batch(0.0, part.events, traffic.page_size, 0, form))
        assert late.blocks == subscriber.blocks
    assert stream.seq > 50 and loras == {None, "poet"}


class Events:
    """A scheduler whose requests run one after the other, and what each told."""

    def __init__(self, num_pages: int) -> None:
        sizes: dict[str, int] = {"page_size": 4, "num_pages": num_pages, "context_length": 16}
        self.scheduler = Scheduler(SchedulerConfig(kv_events=True, **sizes))
        self._runner = FakeRunner(ModelInfo(architecture="fake", dtype="none", vocab_size=9, eos_token_ids=(), **sizes))

    def run(self, prompt: list[int]) -> list[type]:
        self.scheduler.add(Request(0, "r", prompt, SamplingParams(max_tokens=1)))
        while self.scheduler.has_work:
            self.scheduler.update(self._runner.execute(self.scheduler.schedule()))
        return self.take()

    def take(self) -> list[type]:
        return [type(event) for event in self.scheduler.take_kv_events()]


def test_room_that_was_made_is_no_reset_even_if_nothing_is_left() -> None:
    events = Events(num_pages=4)
    assert events.run([1] * 14) == [BlockStored]
    assert events.run([2] * 15) == [BlockRemoved, BlockStored], "all that was cached had to go"


def test_a_flush_is_a_reset_unless_something_is_pinned() -> None:
    events = Events(num_pages=8)
    events.run([1] * 14)
    assert events.scheduler.flush_cache() == 4, "three pages, and a part of one, which no event names"
    assert events.take() == [AllBlocksCleared]
    events.run([2] * 12)
    events.scheduler.pin("p", [2] * 4)
    assert events.scheduler.flush_cache() == 2
    assert events.take() == [BlockRemoved]


def stored(hashes: list[bytes], parent: bytes = b"") -> BlockStored:
    return BlockStored(b"".join(hashes), parent, array("I", range(2 * len(hashes))).tobytes())


def block(index: int) -> bytes:
    return index.to_bytes(16, "big")


async def take(batches: Any, count: int) -> list[KvEventBatch]:
    return [await asyncio.wait_for(anext(batches), 60) for _ in range(count)]


async def test_a_subscriber_gets_a_snapshot_and_then_each_batch() -> None:
    stream = KvEventStream()
    stream.begin(5)
    stream.apply([stored([block(1), block(2)])])
    batches = stream.subscribe()
    [snapshot] = await take(batches, 1)
    assert (snapshot.epoch, snapshot.seq, snapshot.snapshot, snapshot.more) == (5, 2, True, False)
    assert snapshot.events == [AllBlocksCleared(), stored([block(1), block(2)])]
    stream.apply([])
    stream.apply([BlockRemoved(block(2))])
    [delta] = await take(batches, 1)
    assert (delta.seq, delta.snapshot, delta.events) == (3, False, [BlockRemoved(block(2))])
    stream.begin(6)
    [cleared] = await take(batches, 1)
    assert (cleared.epoch, cleared.seq, cleared.digest, cleared.events) == (6, 4, 0, [AllBlocksCleared()])
    await batches.aclose()


async def test_a_large_cache_comes_in_parts_and_what_changes_meanwhile_after_them() -> None:
    stream = KvEventStream()
    blocks = [block(index) for index in range(1, 2 * SNAPSHOT_BLOCKS + 11)]
    stream.apply([stored(blocks)])
    batches = stream.subscribe()
    [first] = await take(batches, 1)
    stream.apply([BlockRemoved(blocks[-1])])
    rest = await take(batches, 3)
    assert [part.more for part in (first, *rest)] == [True, True, False, False]
    assert [part.seq for part in (first, *rest)] == [1, 1, 1, 2]
    runs = [event for part in (first, *rest[:-1]) for event in part.events if isinstance(event, BlockStored)]
    assert [name for run in runs for name in split_hashes(run.hashes)] == blocks
    await batches.aclose()


async def test_a_subscriber_that_does_not_read_gets_a_new_snapshot() -> None:
    stream = KvEventStream()
    batches = stream.subscribe()
    await take(batches, 1)
    for index in range(MOST_BEHIND + 5):
        stream.apply([stored([block(index)])])
    parts = await take(batches, 2)
    assert all(part.snapshot and part.seq == MOST_BEHIND + 5 for part in parts)
    stream.apply([BlockRemoved(block(0))])
    [delta] = await take(batches, 1)
    assert (delta.seq, delta.snapshot) == (MOST_BEHIND + 6, False)
    await batches.aclose()


@pytest.mark.parametrize(("form", "replay_topic"), [("map", [b"kv-events"]), ("array", [])])
async def test_zeromq_subscribers_see_gaps_and_have_them_replayed(
    form: KvEventsFormat, replay_topic: list[bytes]
) -> None:
    publisher = KvEventPublisher("127.0.0.1", 0, 0, topic="kv-events", keep=100, block_size=2, rank=3, form=form)
    stream = KvEventStream()
    stream.listen(publisher.publish)
    for index in range(3):  # nobody has subscribed yet
        stream.apply([stored([block(index)])])
    context = zmq.asyncio.Context()
    sub = context.socket(zmq.SUB)
    sub.setsockopt_string(zmq.SUBSCRIBE, "kv-events")
    sub.connect(f"tcp://{publisher.address}")
    subscriber = DocumentedSubscriber(form, rank=3)
    index = 3
    while not await sub.poll(50):  # until the subscription has arrived
        stream.apply([stored([block(index)])])
        index += 1
    topic, seq, payload = await sub.recv_multipart()
    assert topic == b"kv-events"
    first = int.from_bytes(seq, "big")
    assert first > 3
    dealer = context.socket(zmq.DEALER)
    dealer.connect(f"tcp://{publisher.replay_address}")
    await dealer.send_multipart((b"", (0).to_bytes(8, "big")))
    replayed = []
    while True:
        _, *topics, number_of, old = await asyncio.wait_for(dealer.recv_multipart(), 60)
        if not old:
            assert topics == [b""] * len(replay_topic)
            assert int.from_bytes(number_of, "big", signed=True) == -1
            break
        assert topics == replay_topic
        replayed.append(int.from_bytes(number_of, "big"))
        if replayed[-1] < first:
            subscriber.receive(old)
    assert replayed == list(range(1, stream.seq + 1))
    subscriber.receive(payload)
    while first < stream.seq:
        _, seq, payload = await sub.recv_multipart()
        assert int.from_bytes(seq, "big") == first + 1
        first += 1
        subscriber.receive(payload)
    assert {name for _, name in subscriber.blocks} == {number(block(i)) for i in range(index)}
    publisher.close()
    sub.close()
    dealer.close()
    context.term()


def test_a_port_in_use_is_said_to_be(taken_port: int) -> None:
    with pytest.raises(ConfigError, match="--kv-events-port"):
        KvEventPublisher("127.0.0.1", taken_port, None, topic="", keep=1, block_size=1)


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_events_are_published_over_ipv6(host: str) -> None:
    publisher = KvEventPublisher(host, 0, 0, topic="", keep=1, block_size=1)
    assert publisher.address.startswith("[::1]:")
    assert publisher.replay_address is not None and publisher.replay_address.startswith("[::1]:")
    publisher.close()


async def test_a_worker_streams_its_cache_over_grpc_and_reports_its_digest(start) -> None:
    async with grpc.aio.insecure_channel(start().address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        info = await stub.GetModelInfo(worker_pb2.GetModelInfoRequest())
        prompt = list(range(50))

        async def generate(name: str) -> None:
            sampling = common_pb2.SamplingParams(max_tokens=3)
            async for _ in stub.Generate(
                worker_pb2.WorkerGenerateRequest(request_id=name, token_ids=prompt, sampling=sampling)
            ):
                pass

        await generate("first")
        events = stub.SubscribeKvEvents(worker_pb2.SubscribeKvEventsRequest())
        snapshot = await events.read()
        hashes = hash_pages(prompt, 16)
        assert (snapshot.epoch, snapshot.snapshot, snapshot.more) == (info.epoch, True, False)
        assert snapshot.events[0].HasField("all_blocks_cleared")
        [kept] = [event.block_stored for event in snapshot.events[1:]]
        assert (list(kept.block_hashes), kept.parent_hash) == (hashes, b"")
        assert (list(kept.token_ids), kept.block_size, kept.medium) == (prompt[:48], 16, worker_pb2.KV_MEDIUM_GPU)
        assert snapshot.digest == reduce(xor, map(digest_term, hashes))
        load = (await stub.WatchLoad(worker_pb2.WatchLoadRequest()).read()).load
        assert (load.epoch, load.kv_seq, load.kv_digest) == (info.epoch, snapshot.seq, snapshot.digest)
        await stub.FlushCache(worker_pb2.FlushCacheRequest())
        delta = await events.read()
        assert (delta.seq, delta.snapshot, delta.digest) == (snapshot.seq + 1, False, 0)
        assert delta.events[0].HasField("all_blocks_cleared")
        short = stub.SubscribeKvEvents(worker_pb2.SubscribeKvEventsRequest(token_ids=False))
        await short.read()
        prompt = prompt[::-1]
        await generate("second")
        stored = (await short.read()).events[0].block_stored
        assert list(stored.block_hashes) == hash_pages(prompt, 16)
        assert not stored.token_ids


async def test_a_worker_publishes_what_each_tier_holds_over_zeromq(start, tmp_path) -> None:
    tiers = ("--host-cache-ratio", "2", "--storage", f"file://{tmp_path}", "--storage-min-tokens", "16")
    worker = start(*tiers, "--kv-events-port", "0", "--kv-events-replay-port", "0", "--kv-events-topic", "mine")
    found = re.search(r"KV events on (\S+), replay on (\S+)", worker.log)
    assert found is not None, worker.log
    async with grpc.aio.insecure_channel(worker.address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        async for _ in stub.Generate(worker_pb2.WorkerGenerateRequest(request_id="r", token_ids=range(40))):
            break
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(f"tcp://{found[2]}")
        subscriber = DocumentedSubscriber()
        while {medium for medium, _ in subscriber.blocks} != set(SHARED_MEDIA):
            subscriber = DocumentedSubscriber()
            await dealer.send_multipart((b"", bytes(8)))
            while (frames := await asyncio.wait_for(dealer.recv_multipart(), 60))[3]:
                subscriber.receive(frames[3])
        for medium in SHARED_MEDIA:
            assert {number(name) for name in hash_pages(range(40), 16)} <= {
                name for where, name in subscriber.blocks if where == medium
            }
        dealer.linger = 0
