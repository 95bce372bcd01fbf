"""Merges the KV events of ranks that have a prefix cache each: a block is there as long as any of them has it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from sapwood_common.contract.page_hash import HASH_BYTES
from sapwood_worker.records.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, Medium, split_hashes

_Block = tuple[Medium, bytes]


class MergedEvents:
    """What each rank has, and what of that the others have too. O(blocks that change) times ranks; O(cached blocks) of memory.

    Args:
        ranks: Their number.
    """

    def __init__(self, ranks: int) -> None:
        # Parents stand before their children.
        self._held: list[dict[_Block, None]] = [{} for _ in range(ranks)]

    def merge(self, events: Sequence[Sequence[KvEvent]]) -> list[KvEvent]:
        """What changes for all of them together.

        Args:
            events: Each rank's since the last call.
        """
        merged: list[KvEvent] = []
        for rank, own in enumerate(events):
            for event in own:
                match event:
                    case BlockStored():
                        merged += self._stored(rank, event)
                    case BlockRemoved(hashes, medium):
                        merged += self._removed(rank, [(medium, each) for each in split_hashes(hashes)])
                    case AllBlocksCleared():
                        merged += self._removed(rank, list(self._held[rank])[::-1])
        return merged

    def _stored(self, rank: int, event: BlockStored) -> list[KvEvent]:
        hashes = split_hashes(event.hashes)
        size = len(event.token_ids) // len(hashes)
        new = [not self._elsewhere(rank, (event.medium, each)) for each in hashes]
        self._held[rank].update(dict.fromkeys((event.medium, each) for each in hashes))
        found: list[KvEvent] = []
        for is_new, run in groupby(range(len(hashes)), new.__getitem__):
            places = list(run)
            if is_new:
                first, end = places[0], places[-1] + 1
                parent = hashes[first - 1] if first else event.parent
                blocks, tokens = slice(first * HASH_BYTES, end * HASH_BYTES), slice(first * size, end * size)
                found.append(
                    BlockStored(event.hashes[blocks], parent, event.token_ids[tokens], event.medium, event.lora)
                )
        return found

    def _removed(self, rank: int, blocks: Sequence[_Block]) -> list[KvEvent]:
        for block in blocks:
            self._held[rank].pop(block, None)
        gone = [block for block in blocks if not self._elsewhere(rank, block)]
        return [
            BlockRemoved(b"".join(each for _, each in run), medium)
            for medium, run in groupby(gone, lambda block: block[0])
        ]

    def _elsewhere(self, rank: int, block: _Block) -> bool:
        return any(block in held for other, held in enumerate(self._held) if other != rank)
