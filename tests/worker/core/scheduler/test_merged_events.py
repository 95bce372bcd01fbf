"""The ranks' KV events as one stream: a subscriber holds what any of the ranks has."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sapwood_common.contract.page_hash import HASH_BYTES
from sapwood_worker.core.scheduler.rank_planner import MergedEvents
from sapwood_worker.records.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, split_hashes

CHAINS, LENGTH, TOKENS = 3, 5, 16


def block(chain: int, place: int) -> bytes:
    return bytes([chain, place]) * (HASH_BYTES // 2)


def tokens(chain: int, place: int) -> bytes:
    return bytes([16 * chain + place]) * TOKENS


def apply(held: dict[bytes, bytes], events: list[KvEvent]) -> None:
    """Lets a subscriber take events: what it holds, with each block's tokens."""
    for event in events:
        match event:
            case BlockStored(hashes, parent, token_ids):
                for place, each in enumerate(split_hashes(hashes)):
                    assert each not in held, "told twice"
                    assert not parent or parent in held, "its parent is not there"
                    held[each] = token_ids[place * TOKENS : (place + 1) * TOKENS]
                    parent = each
            case BlockRemoved(hashes):
                for each in split_hashes(hashes):
                    del held[each]
            case AllBlocksCleared():
                held.clear()


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, CHAINS), st.integers(0, LENGTH)), max_size=60))
def test_a_subscriber_holds_what_any_rank_has(moves: list[tuple[int, int, int]]) -> None:
    """Each move has a rank grow or cut one of its chains to a length; of the chain after the last it clears all."""
    merged = MergedEvents(3)
    lengths = [[0] * CHAINS for _ in range(3)]
    held: dict[bytes, bytes] = {}
    for rank, chain, length in moves:
        events: list[KvEvent] = []
        if chain == CHAINS:
            events.append(AllBlocksCleared())
            lengths[rank] = [0] * CHAINS
        else:
            has = lengths[rank][chain]
            if length > has:
                places = range(has, length)
                parent = block(chain, has - 1) if has else b""
                hashes, held_tokens = (b"".join(make(chain, place) for place in places) for make in (block, tokens))
                events.append(BlockStored(hashes, parent, held_tokens))
            elif length < has:
                events.append(BlockRemoved(b"".join(block(chain, place) for place in reversed(range(length, has)))))
            lengths[rank][chain] = length
        apply(held, merged.merge([events if each == rank else [] for each in range(3)]))
        longest = [max(each) for each in zip(*lengths, strict=True)]
        expected = {block(i, place): tokens(i, place) for i in range(CHAINS) for place in range(longest[i])}
        assert held == expected
