"""Pages of which several hosts have parts: rank 0 puts objects together, and takes them apart, over connections."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from multiprocessing import Pipe

import numpy as np
import pytest

from sapwood_worker.model.pools.host_pool import ARRIVING_PAGES, HEADER_BYTES, HostPool, PageOrder, RankPart
from sapwood_worker.model.pools.pool_over_hosts import DistantPages, PoolOverHosts, serve_pages
from sapwood_worker.records.kv_layout import KVComponent, KVLayout

PAGES = 40
LAYOUTS = {
    "all heads": (KVComponent((0, 1, 2), 2, 4, 3, "float32"),),
    "replicated beside split": (
        KVComponent((0, 2), 1, 1, 6, "float32", sharding="replicated"),
        KVComponent((1,), 2, 4, 4, "float8_e4m3fn"),
    ),
}


def parts_of(whole: KVLayout, ranks: int, stages: int) -> tuple[list[RankPart], list[int]]:
    """What each rank has of a page, side by side, and where each begins."""
    parts, starts = [], [0]
    for stage in range(stages):
        layers = range(3 * stage // stages, 3 * (stage + 1) // stages)
        for rank in range(ranks):
            parts.append(RankPart(starts[-1], whole.stage(layers).shard(ranks), rank, ranks))
            starts.append(starts[-1] + parts[-1].layout.page_bytes)
    return parts, starts


@contextmanager
def hosts(whole: KVLayout, ranks: int, stages: int, count: int) -> Iterator[tuple[PoolOverHosts, HostPool, HostPool]]:
    """Rank 0's pool, that of the last host, and one of as many ranks on one host."""
    parts, starts = parts_of(whole, ranks, stages)
    order, each = PageOrder(whole, parts), len(parts) // count
    ends = starts[::each]
    distant, served, threads = [], [], []
    for start, end in pairwise(ends[1:]):
        ours, theirs = Pipe()
        served.append(HostPool(PAGES, end - start))
        threads.append(threading.Thread(target=serve_pages, args=(theirs, served[-1])))
        threads[-1].start()
        distant.append((ours, DistantPages(ours, slice(start, end))))
    pool = PoolOverHosts(PAGES, ends[1], None, None, order, [each for _, each in distant], starts[-1])
    yield pool, served[-1], HostPool(PAGES, starts[-1], order=order)
    for way, _ in distant:
        way.close()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("ranks", "stages", "count"), [(2, 1, 2), (4, 1, 2), (2, 2, 2), (1, 3, 3)])
def test_objects_are_those_of_ranks_on_one_host(name: str, ranks: int, stages: int, count: int) -> None:
    whole = KVLayout(LAYOUTS[name], page_size=4)
    bytes_of = np.random.default_rng(1)
    with hosts(whole, ranks, stages, count) as (pool, last, single):
        objects = bytes_of.integers(0, 256, (PAGES, whole.page_bytes), np.uint8)
        for first in range(0, PAGES, 8):
            pages = range(first, first + 8)
            for each in (pool, single):
                with each.arriving(pages) as records:
                    for page, record in zip(pages, records, strict=True):
                        record[HEADER_BYTES:] = objects[page].data
                    each.unpack(pages, records)
        size, start = last.page_bytes, HEADER_BYTES
        contents = single.records[:PAGES, start : start + single.page_bytes]
        assert (pool.content == contents[:, : pool.page_bytes]).all()
        assert (last.records[:PAGES, start : start + size] == contents[:, -size:]).all()
        assert all(bytes(pool.packed(page)[HEADER_BYTES:]) == objects[page].tobytes() for page in range(PAGES))
        with pool.objects([3, 39, 5]) as found:
            assert [bytes(each[HEADER_BYTES:]) for each in found] == [objects[page].tobytes() for page in (3, 39, 5)]
            assert all(np.shares_memory(np.frombuffer(each, np.uint8), pool.buffers) for each in found)
            for each in found:
                each[:HEADER_BYTES] = bytes(HEADER_BYTES)  # as a store's header is written
        assert (pool.whole_bytes, pool.object_bytes) == (single.whole_bytes, single.object_bytes)
        assert not pool.in_place
        assert pool.shared is None


def test_many_read_at_once_and_wait_for_room() -> None:
    whole = KVLayout(LAYOUTS["all heads"], page_size=4)
    with hosts(whole, 2, 1, 2) as (pool, _, _):

        def turn(number: int) -> None:
            pages = [number % PAGES] * (ARRIVING_PAGES // 3)  # three have room, and no more
            with pool.arriving(pages) as records:
                for record in records:
                    record[HEADER_BYTES:] = bytes([number % PAGES + 1]) * whole.page_bytes
                assert all(record[-1] == number % PAGES + 1 for record in records)
                pool.unpack(pages[:1], records[:1])

        with ThreadPoolExecutor(8) as executor:
            list(executor.map(turn, range(2 * PAGES)))
        for page in range(PAGES):
            assert set(pool.packed(page)[HEADER_BYTES:]) == {page + 1}


def test_a_host_that_is_gone_is_an_error() -> None:
    whole = KVLayout(LAYOUTS["all heads"], page_size=4)
    parts, starts = parts_of(whole, 2, 1)
    ours, theirs = Pipe()
    theirs.close()
    distant = [DistantPages(ours, slice(*starts[1:]))]
    pool = PoolOverHosts(PAGES, starts[1], None, None, PageOrder(whole, parts), distant, starts[-1])
    with pytest.raises(OSError, match="roken pipe"):
        pool.packed(0)
