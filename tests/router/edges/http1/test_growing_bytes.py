"""Bytes that grow are what was added, and large ones are memory that goes back at once."""

import mmap
import random
import weakref

import pytest

from sapwood_router.edges.http1.body import GrowingBytes


@pytest.mark.parametrize("count", [0, 1, 3, 40, 400])
def test_what_was_added_is_there_in_order(count) -> None:
    random_ = random.Random(count)
    parts = [random_.randbytes(random_.randrange(70_000)) for _ in range(count)]
    grown = GrowingBytes()
    for part in parts:
        grown.add(part)
    assert grown.size == sum(map(len, parts))
    assert grown.view() == b"".join(parts)


def test_large_ones_have_memory_of_their_own_until_they_are_dropped() -> None:
    grown = GrowingBytes()
    for _ in range(100):
        grown.add(bytes(10_000))
    view = grown.view()
    assert isinstance(view, memoryview)
    assert isinstance(view.obj, mmap.mmap)
    mapped = weakref.ref(view.obj)
    del grown
    assert mapped() is not None
    del view
    assert mapped() is None  # without the collector
