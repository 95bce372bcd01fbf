"""What is kept of responses: whose, how many, how much, and what goes first."""

from __future__ import annotations

import pytest

from sapwood_common.errors import InvalidArgumentError, NotFoundError
from sapwood_router.edges.responses.store import ResponseStore, StoredResponse
from sapwood_router.request.context import Turn

MUCH = 10**9


def response(name: str, previous: str | None = None, size: int = 0) -> StoredResponse:
    return StoredResponse(name, b"x" * size, (Turn("user", name),), previous, 0)


def test_a_conversation_of_too_many_turns_is_not_gone_on_with() -> None:
    store, turns = ResponseStore(9, MUCH), (Turn("user", "a"),) * 20_000
    store.put("alice", StoredResponse("a", b"", turns, None, 0))
    store.put("alice", StoredResponse("b", b"", turns, "a", 0))
    assert len(store.history("alice", "a", "previous_response_id")) == len(turns)
    with pytest.raises(InvalidArgumentError, match="more than 32768 turns"):
        store.history("alice", "b", "previous_response_id")


def has(store: ResponseStore, tenant: str, name: str) -> bool:
    try:
        return store.get(tenant, name).response_id == name
    except NotFoundError:
        return False


def test_what_a_tenant_has_not_used_for_longest_goes_first() -> None:
    store = ResponseStore(3, MUCH)
    for name in "abc":
        store.put("alice", response(name))
        store.put("bob", response(name))
    store.history("alice", "a", "previous_response_id")
    store.put("alice", response("d"))
    assert [name for name in "abcd" if has(store, "alice", name)] == ["a", "c", "d"]
    assert all(has(store, "bob", name) for name in "abc")


def test_beyond_the_memory_the_tenant_with_most_gives_way() -> None:
    store = ResponseStore(100, 20 * response("a", size=4096).size)
    store.put("bob", response("his", size=4096))
    for number in range(50):
        store.put("alice", response(f"a{number}", size=4096))
    assert has(store, "bob", "his")
    assert [number for number in range(50) if has(store, "alice", f"a{number}")] == list(range(31, 50))
    assert store.size == 20 * response("a", size=4096).size
    store.put("alice", response("huge", size=MUCH // 100))
    assert not has(store, "alice", "huge")


def test_a_history_is_told_from_its_beginning_and_only_to_its_own_tenant() -> None:
    store = ResponseStore(10, MUCH)
    store.put("alice", response("a"))
    store.put("alice", response("b", "a"))
    assert [turn.content for turn in store.history("alice", "b", "x")] == ["a", "b"]
    for tenant, name in (("bob", "b"), ("alice", "c")):
        with pytest.raises(NotFoundError) as caught:
            store.history(tenant, name, "x")
        assert caught.value.field == "x"
    store.delete("alice", "a")
    with pytest.raises(NotFoundError, match="'a'"):
        store.history("alice", "b", "x")
    with pytest.raises(NotFoundError):
        store.delete("alice", "a")
    store.delete("alice", "b")
    assert store.size == 0


def test_a_chain_that_is_used_stays_whole() -> None:
    store = ResponseStore(4, MUCH)
    for name, previous in (("a", None), ("b", "a"), ("x", None), ("c", "b")):
        store.put("", response(name, previous))
    store.history("", "c", "x")
    store.put("", response("d", "c"))
    assert [turn.content for turn in store.history("", "d", "x")] == ["a", "b", "c", "d"]


def test_none_is_kept_where_none_is_wanted() -> None:
    store = ResponseStore(0, MUCH)
    store.put("", response("a"))
    assert (store.keeps, store.size, has(store, "", "a")) == (False, 0, False)
