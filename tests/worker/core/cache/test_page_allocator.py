import pytest
from hypothesis import given
from hypothesis import strategies as st

from sapwood_worker.core.cache.pages import CACHE, LedgerError, PageAllocator


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=40))
def test_every_page_has_one_owner_through_any_sequence_of_moves(operations: list[tuple[int, int]]) -> None:
    ledger = PageAllocator(12)
    for owner, count in operations:
        if count <= ledger.num_free:
            pages = ledger.allocate(count, owner)
            assert len(set(pages.tolist())) == count
        else:
            ledger.free(ledger.owned_by(owner), owner)
        ledger.check()
        owned = [page for slot in range(4) for page in ledger.owned_by(slot).tolist()]
        assert len(owned) == len(set(owned)) == ledger.num_used


def test_a_double_free_names_the_request() -> None:
    ledger = PageAllocator(4)
    ledger.name(7, "request abc")
    pages = ledger.allocate(2, owner=7)
    ledger.free(pages, 7)
    with pytest.raises(LedgerError, match=r"nobody.*request abc"):
        ledger.free(pages, 7)
    again = ledger.allocate(1, owner=7)
    with pytest.raises(LedgerError, match="request abc frees a page twice"):
        ledger.free([again[0], again[0]], 7)


def test_a_page_cannot_be_freed_or_moved_by_who_does_not_own_it() -> None:
    ledger = PageAllocator(4)
    pages = ledger.allocate(2, owner=1)
    with pytest.raises(LedgerError, match=r"slot 1, not to the request in slot 2"):
        ledger.free(pages, 2)
    ledger.move(pages, 1, CACHE)
    with pytest.raises(LedgerError, match="the prefix cache"):
        ledger.move(pages, 1, 2)


def test_taking_more_than_is_free_is_refused() -> None:
    ledger = PageAllocator(4)
    with pytest.raises(LedgerError, match="4 are free"):
        ledger.allocate(5, owner=0)


def test_a_handle_is_stale_once_its_page_was_allocated_again_even_for_the_same_owner() -> None:
    ledger = PageAllocator(2)
    ledger.name(0, "request abc")
    handle = ledger.handle(ledger.allocate(1, owner=0))
    ledger.confirm(handle)
    ledger.move(handle.pages, 0, CACHE)
    ledger.confirm(handle)
    ledger.free(handle.pages, CACHE)
    assert (ledger.allocate(1, owner=0) == handle.pages).all()
    with pytest.raises(LedgerError, match=r"changed hands.*request abc"):
        ledger.confirm(handle)


def test_an_owner_that_ends_with_pages_is_named() -> None:
    ledger = PageAllocator(4)
    ledger.name(3, "request abc")
    pages = ledger.allocate(2, owner=3)
    ledger.move(pages[:1], 3, CACHE)
    with pytest.raises(LedgerError, match=r"request abc has ended, but keeps pages \[1\]"):
        ledger.ended(3)
    ledger.free(pages[1:], 3)
    ledger.ended(3)
    assert (ledger.num_held(CACHE), ledger.num_held(3)) == (1, 0)
