"""Pages that ranks keep in parts: groups of any size hold the same page."""

from __future__ import annotations

import numpy as np
import pytest

from sapwood_worker.model.pools.host_pool import BATCH_PAGES, HEADER_BYTES, HostPool, PageOrder, RankPart
from sapwood_worker.records.kv_layout import KVComponent, KVLayout

LAYERS = 5
LAYOUTS = {
    "all heads": (KVComponent(tuple(range(LAYERS)), 2, 4, 3, "float32"),),
    "a window, and heads that ranks share": (
        KVComponent((1, 3, 4), 2, 2, 4, "bfloat16"),
        KVComponent((0, 2), 2, 4, 2, "bfloat16", needed=8),
    ),
    "replicated beside split": (
        KVComponent((0, 1, 4), 1, 1, 6, "float32", sharding="replicated"),
        KVComponent((2, 3), 2, 4, 4, "float8_e4m3fn"),
    ),
}
SIZES = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 3)]


def content_of(layout: KVLayout, whole: KVLayout, rank: int, ranks: int) -> bytes:
    """A rank's bytes of a page: of each component, layer, part and head numbers that tell them apart."""
    found = b""
    for own, every in zip(layout.components, whole.components, strict=True):
        first = 0 if own.sharding == "replicated" else rank * every.heads // ranks
        width = layout.layer_bytes(own) // own.parts // own.heads
        for layer in own.layers:
            for part in range(own.parts):
                for head in range(first, first + own.heads):
                    numbers = np.arange(width) * 7 + layer * 101 + part * 31 + head * 13
                    found += (numbers % 251).astype(np.uint8).tobytes()
    return found


def parts_of(whole: KVLayout, ranks: int, stages: int) -> tuple[list[RankPart], bytes]:
    """The parts of each rank, and what they hold side by side."""
    parts, content = [], b""
    for stage in range(stages):
        layers = range(LAYERS * stage // stages, LAYERS * (stage + 1) // stages)
        for rank in range(ranks):
            layout = whole.stage(layers).shard(ranks)
            parts.append(RankPart(len(content), layout, rank, ranks))
            content += content_of(layout, whole, rank, ranks)
    return parts, content


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("ranks", "stages"), SIZES)
def test_the_parts_of_any_group_are_one_and_the_same_object(name: str, ranks: int, stages: int) -> None:
    whole = KVLayout(LAYOUTS[name], page_size=4)
    expected = content_of(whole, whole, 0, 1)
    parts, content = parts_of(whole, ranks, stages)
    pool = HostPool(3, len(content), order=PageOrder(whole, parts))
    pool.content[1] = np.frombuffer(content, np.uint8)
    with pool.objects([0, 1]) as objects:
        assert bytes(objects[1][HEADER_BYTES:]) == bytes(pool.packed(1)[HEADER_BYTES:]) == expected
        assert all(np.shares_memory(np.frombuffer(each, np.uint8), pool.records) for each in objects)
    assert pool.content[1].tobytes() == content, "packing changes no page"
    with pool.arriving([2]) as [record]:
        assert len(record) == HEADER_BYTES + len(expected)
        record[HEADER_BYTES:] = expected
        pool.unpack([2], [record])
    assert pool.content[2].tobytes() == content


def test_as_many_objects_as_are_asked_for_at_once_have_room() -> None:
    whole = KVLayout(LAYOUTS["all heads"], page_size=4)
    parts, content = parts_of(whole, 2, 1)
    pool = HostPool(BATCH_PAGES, len(content), order=PageOrder(whole, parts))
    pool.content[:] = np.arange(BATCH_PAGES, dtype=np.uint8)[:, None]
    with pool.objects(range(BATCH_PAGES)) as objects:
        assert [each[-1] for each in objects] == list(range(BATCH_PAGES))
