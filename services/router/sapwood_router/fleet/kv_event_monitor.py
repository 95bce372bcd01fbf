"""Keeps the exact index true to one worker's KV events.

The worker sends a snapshot and then every change. Each change has a number and a digest of all that the worker holds after it. A
number out of turn, or a digest that differs from ours, means that something was lost or came in the wrong order. Then the stream
is opened again, and begins with a new snapshot. The digest in the worker's heartbeats reveals a stream that has fallen silent.
While there is no stream, the worker is not in the index, and policies use the router's own placements.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

import grpc

from sapwood.v1 import worker_pb2, worker_pb2_grpc
from sapwood_common.contract.page_hash import digest_term
from sapwood_common.errors import ConfigError
from sapwood_common.network.channel import Dialer
from sapwood_router.fleet.worker import Worker
from sapwood_router.routing.index.blocks import BlockIndex, Tier
from sapwood_router.routing.worker_view import Load

logger = logging.getLogger(__name__)

_RETRY_INTERVAL = 0.5
_CHECK_INTERVAL = 1.0
_A_TURN = 128
"""Pages of an event that are taken in a turn of the event loop."""
_TIERS: dict[int, Tier] = {
    worker_pb2.KV_MEDIUM_GPU: Tier.GPU,
    worker_pb2.KV_MEDIUM_CPU_TIER1: Tier.HOST,
    worker_pb2.KV_MEDIUM_CPU_TIER2: Tier.REMOTE,
}


class DriftError(Exception):
    """The received events do not match the worker's cache."""


class KvEventFollower:
    """Applies one worker's messages to the index. Begins with nothing; a snapshot comes first.

    Args:
        address: The worker's.
        index: What is kept true.
    """

    def __init__(self, address: str, index: BlockIndex) -> None:
        self._address = address
        self._index = index
        self._digest = 0
        self._whole = False
        self._epoch = 0
        self._seq = 0

    def apply(self, message: worker_pb2.SubscribeKvEventsResponse) -> None:
        """Takes the next message. Raises as :meth:`in_turns`."""
        for _ in self.in_turns(message):
            pass

    def in_turns(self, message: worker_pb2.SubscribeKvEventsResponse) -> Iterator[None]:
        """Takes the next message, some pages at a time: the pages of a long prompt would delay other requests' tokens.

        Raises:
            DriftError: The message does not follow the last batch, or the index has another digest than the worker.
        """
        if message.snapshot:
            self._whole = not message.more
        elif (message.epoch, message.seq) != (self._epoch, self._seq + 1) and not self._begins_anew(message):
            raise DriftError(f"change {message.seq} came after {self._seq}")
        for event in message.events:
            yield from self._take(event)
        self._epoch, self._seq = message.epoch, message.seq
        if self._whole and self._digest != message.digest:
            raise DriftError(f"after change {message.seq} the worker holds something else")

    def agrees(self, load: Load) -> bool:
        """Whether a worker's report does not contradict the events heard. An older report says nothing; one that is newer, or of
        another digest, shows that events were lost.
        """
        if not self._whole or (load.epoch, load.kv_seq) < (self._epoch, self._seq):
            return True
        return (load.epoch, load.kv_seq, load.kv_digest) == (self._epoch, self._seq, self._digest)

    def _begins_anew(self, message: worker_pb2.SubscribeKvEventsResponse) -> bool:
        """Whether a new scheduler has started behind the same front: its first event says that nothing is cached."""
        return (
            message.epoch != self._epoch and bool(message.events) and message.events[0].HasField("all_blocks_cleared")
        )

    def _take(self, event: worker_pb2.KvEvent) -> Iterator[None]:
        kind = event.WhichOneof("event")
        if kind == "block_stored":
            stored = event.block_stored
            for hashes in _parts(stored.block_hashes):
                self._index.store(self._address, self._digested(hashes, stored.medium), hashes)
                yield
        elif kind == "block_removed":
            removed = event.block_removed
            for hashes in _parts(removed.block_hashes):
                self._index.drop(self._address, self._digested(hashes, removed.medium), hashes)
                yield
        elif kind == "all_blocks_cleared":
            self._index.reset(self._address)
            self._digest = 0

    def _digested(self, hashes: Iterable[bytes], medium: int) -> Tier:
        """Adds an event's pages to the digest, or takes them out (it is an exclusive or), and returns the event's tier."""
        tier = _TIERS.get(medium)
        if tier is None:
            raise DriftError(f"medium {medium} is unknown")
        for page in hashes:
            self._digest ^= digest_term(page, tier)
        return tier


def _parts(hashes: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """The hashes in parts, each of as many as are taken in one turn of the event loop."""
    for start in range(0, len(hashes), _A_TURN):
        yield hashes[start : start + _A_TURN]


class KvEventMonitor:
    """Follows one worker's events for as long as it runs.

    Args:
        worker: The worker.
        index: The index that mirrors the worker's cache.
        dialer: Opens channels.
        on_drift: Called when something had been lost and the index begins again for this worker.
    """

    def __init__(
        self, worker: Worker, index: BlockIndex, dialer: Dialer, on_drift: Callable[[], None] = lambda: None
    ) -> None:
        self._worker = worker
        self._index = index
        self._dialer = dialer
        self._on_drift = on_drift

    async def run(self) -> None:
        """Follows, again after each loss, for ever; a worker that publishes no events is asked again when it has restarted.
        Cancel it to stop.
        """
        address = self._worker.address
        try:
            while True:
                try:
                    await self._follow()
                except DriftError as error:
                    logger.warning("KV events of worker %s: %s; asking for all of them again", address, error)
                    self._on_drift()
                except grpc.aio.AioRpcError as error:
                    if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                        logger.info("worker %s publishes no KV events: routing by our own placements", address)
                        await self._until_restarted()
                except ConfigError as error:  # TLS files that are being replaced
                    logger.warning("KV events of worker %s: %s", address, error)
                except Exception:  # what it sends makes no sense: that costs this stream, not its events for ever
                    logger.exception("KV events of worker %s", address)
                self._index.remove(address)
                await asyncio.sleep(_RETRY_INTERVAL)
        finally:
            self._index.remove(address)

    async def _until_restarted(self) -> None:
        epoch = self._epoch()
        while self._epoch() in (epoch, None):  # noqa: ASYNC110 - once a second is soon enough to need no event
            await asyncio.sleep(_CHECK_INTERVAL)

    def _epoch(self) -> int | None:
        return None if self._worker.model is None else self._worker.model.epoch

    async def _follow(self) -> None:
        follower = KvEventFollower(self._worker.address, self._index)
        async with self._dialer.open(self._worker.address) as channel:
            request = worker_pb2.SubscribeKvEventsRequest(token_ids=False)
            messages = worker_pb2_grpc.WorkerStub(channel).SubscribeKvEvents(request)

            async def listen() -> None:
                async for message in messages:
                    for _ in follower.in_turns(message):
                        await asyncio.sleep(0)

            tasks = {asyncio.create_task(listen()), asyncio.create_task(self._check(follower))}
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
            for task in done:
                task.result()

    async def _check(self, follower: KvEventFollower) -> None:
        """Ends when a report of the worker's has been ahead of its events for a whole interval."""
        while True:
            report = self._worker.load
            await asyncio.sleep(_CHECK_INTERVAL)
            if not follower.agrees(report):
                raise DriftError("the worker's reports are ahead of its events")
