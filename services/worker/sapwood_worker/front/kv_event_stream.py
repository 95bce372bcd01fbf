"""The front's copy of what is cached, and the streams of KV events that are cut from it.

Each batch of events has a sequence number, one more than the last one's. A subscriber gets a snapshot of the cache and then
every batch after it; one that reads too slowly gets a new snapshot instead of the batches it missed, so that nothing grows
without bound. Applying a batch is O(its blocks), a snapshot O(cached blocks).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from sapwood_common.contract.page_hash import HASH_BYTES, digest_term
from sapwood_worker.records.kv_events import (
    MEDIA,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEvent,
    Medium,
    split_hashes,
)

MOST_BEHIND = 1024
"""Batches that are kept for a subscriber; one that is further behind starts again with a snapshot."""
SNAPSHOT_BLOCKS = 1024
"""Blocks in one message of a snapshot, at most."""


@dataclass(frozen=True, slots=True)
class KvEventBatch:
    """The cache changes of one scheduler step, or a part of a snapshot.

    Attributes:
        epoch: The start of the scheduler that holds the cache.
        seq: The number of the last batch that has been applied with this one.
        digest: The sum over the cache after it (``sapwood_common.contract.page_hash.digest_term``).
        events: In order.
        snapshot: Whether it is part of a snapshot; the first part begins with AllBlocksCleared.
        more: Whether further parts of the snapshot follow.
    """

    epoch: int
    seq: int
    digest: int
    events: Sequence[KvEvent]
    snapshot: bool = False
    more: bool = False


@dataclass(frozen=True, slots=True)
class _Block:
    parent: bytes
    token_ids: bytes
    lora: str


@dataclass(slots=True, eq=False)
class _Subscriber:
    batches: deque[KvEventBatch] = field(default_factory=deque)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    behind: bool = False


class KvEventStream:
    """The cached blocks by medium, and their subscribers. Lives on one event loop.

    Attributes:
        epoch: The start of the scheduler that holds the cache.
        seq: The number of the last batch.
        digest: The sum over what is cached, as in :class:`KvEventBatch`.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.seq = 0
        self.digest = 0
        self._blocks: dict[Medium, dict[bytes, _Block]] = {medium: {} for medium in MEDIA}
        self._subscribers: set[_Subscriber] = set()
        self._listeners: list[Callable[[KvEventBatch], None]] = []

    @property
    def num_blocks(self) -> int:
        """Cached blocks on all media."""
        return sum(map(len, self._blocks.values()))

    def listen(self, listener: Callable[[KvEventBatch], None]) -> None:
        """Has ``listener`` called with each batch from now on."""
        self._listeners.append(listener)

    def begin(self, epoch: int) -> None:
        """Starts again with an empty cache: a scheduler has started."""
        self.epoch = epoch
        self.apply([AllBlocksCleared()])

    def apply(self, events: Sequence[KvEvent]) -> None:
        """Takes a step's events, if there are any, and hands them on."""
        if not events:
            return
        for event in events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved(hashes, medium):
                    self._remove(hashes, medium)
                case AllBlocksCleared():
                    for blocks in self._blocks.values():
                        blocks.clear()
                    self.digest = 0
        self.seq += 1
        batch = KvEventBatch(self.epoch, self.seq, self.digest, events)
        for listener in self._listeners:
            listener(batch)
        for subscriber in self._subscribers:
            if len(subscriber.batches) >= MOST_BEHIND:
                subscriber.batches.clear()
                subscriber.behind = True
            if not subscriber.behind:
                subscriber.batches.append(batch)
            subscriber.wake.set()

    async def subscribe(self) -> AsyncGenerator[KvEventBatch, None]:
        """A snapshot in one or more parts, then each batch as it comes, without end."""
        subscriber = _Subscriber(behind=True)
        self._subscribers.add(subscriber)
        try:
            while True:
                if subscriber.behind:
                    subscriber.behind = False
                    for part in self.snapshot():
                        yield part
                while subscriber.batches and not subscriber.behind:
                    yield subscriber.batches.popleft()
                if not subscriber.behind:
                    subscriber.wake.clear()
                    await subscriber.wake.wait()
        finally:
            self._subscribers.discard(subscriber)

    def snapshot(self) -> list[KvEventBatch]:
        """The cache now, parents before children."""
        groups: list[list[KvEvent]] = [[AllBlocksCleared()]]
        count = 0
        for event in self._runs():
            size = len(event.hashes) // HASH_BYTES
            if count + size > SNAPSHOT_BLOCKS:
                groups.append([])
                count = 0
            groups[-1].append(event)
            count += size
        last = len(groups) - 1
        return [
            KvEventBatch(self.epoch, self.seq, self.digest, events, snapshot=True, more=index < last)
            for index, events in enumerate(groups)
        ]

    def _store(self, event: BlockStored) -> None:
        blocks, level = self._blocks[event.medium], MEDIA.index(event.medium)
        hashes = split_hashes(event.hashes)
        size = len(event.token_ids) // len(hashes)
        parent = event.parent
        for index, block in enumerate(hashes):
            if block not in blocks:
                blocks[block] = _Block(parent, event.token_ids[index * size : (index + 1) * size], event.lora)
                self.digest ^= digest_term(block, level)
            parent = block

    def _remove(self, hashes: bytes, medium: Medium) -> None:
        blocks, level = self._blocks[medium], MEDIA.index(medium)
        for block in split_hashes(hashes):
            if blocks.pop(block, None) is not None:
                self.digest ^= digest_term(block, level)

    def _runs(self) -> Iterator[BlockStored]:
        """All blocks; a chain of blocks is one event. Parents come first, since a dict keeps the order of insertion."""
        for medium, blocks in self._blocks.items():
            run: list[tuple[bytes, _Block]] = []
            for block in blocks.items():
                if run and (block[1].parent != run[-1][0] or len(run) == SNAPSHOT_BLOCKS):
                    yield _run(run, medium)
                    run = []
                run.append(block)
            if run:
                yield _run(run, medium)


def _run(blocks: list[tuple[bytes, _Block]], medium: Medium) -> BlockStored:
    first = blocks[0][1]
    return BlockStored(
        b"".join(name for name, _ in blocks),
        first.parent,
        b"".join(block.token_ids for _, block in blocks),
        medium,
        first.lora,
    )
