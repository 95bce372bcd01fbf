from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sapwood_common.errors import ResourceExhaustedError
from sapwood_common.shared_bytes import SharedBytes


def test_one_owner_gets_half_and_another_finds_room() -> None:
    shared = SharedBytes(100, "pictures")
    for _ in range(5):
        shared.hold("a", 10)
    with pytest.raises(ResourceExhaustedError, match="pictures of running requests take 50 of 100 bytes"):
        shared.hold("a", 10)
    shared.hold("b", 25)
    shared.release("a", 50)
    shared.hold("b", 12)
    assert shared.total == 37


def test_a_first_request_may_take_all_that_is_free() -> None:
    shared = SharedBytes(100, "pictures")
    shared.hold("a", 100)
    with pytest.raises(ResourceExhaustedError):
        shared.hold("b", 1)
    shared.release("a", 100)
    shared.hold("b", 1)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 60), st.booleans()), max_size=60),
)
def test_what_is_held_is_what_was_taken_and_never_more_than_the_limit(steps: list[tuple[str, int, bool]]) -> None:
    shared, held = SharedBytes(100, "x"), []
    for owner, size, gives_back in steps:
        if gives_back and held:
            shared.release(*held.pop(0))
        else:
            try:
                shared.hold(owner, size)
            except ResourceExhaustedError:
                mine = sum(each for name, each in held if name == owner)
                assert size > 100 - shared.total or mine + size > 100 - shared.total
            else:
                held.append((owner, size))
        assert shared.total == sum(size for _, size in held) <= 100
    for each in held:
        shared.release(*each)
    assert shared.total == 0
