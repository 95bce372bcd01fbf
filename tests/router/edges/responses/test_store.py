"""What is kept of responses: whose, how many, how much, and what goes first."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from sapwood_common.errors import InvalidArgumentError, NotFoundError
from sapwood_router.edges.responses.store import ResponseStore, StoredResponse
from sapwood_router.request.context import Turn
from sapwood_router.store.opening import open_store
from sapwood_router.store.records import KEPT, Retention

MUCH = 10**9


@pytest.fixture
async def make() -> AsyncIterator[Callable[..., ResponseStore]]:
    opened = []

    def open_one(most: int, most_bytes: int = MUCH) -> ResponseStore:
        retention = Retention(most, most_bytes)
        opened.append(open_store("memory", 0, retention))
        return ResponseStore(opened[-1], retention)

    yield open_one
    for store in opened:
        await store.close()


def response(name: str, previous: str | None = None, size: int = 0) -> StoredResponse:
    return StoredResponse(name, b"x" * size, (Turn("user", name),), previous)


async def test_a_conversation_of_too_many_turns_is_not_gone_on_with(make) -> None:
    store, turns = make(9), (Turn("user", "a"),) * 20_000
    await store.put("alice", StoredResponse("a", b"", turns, None))
    await store.put("alice", StoredResponse("b", b"", turns, "a"))
    assert len(await store.history("alice", "a", "previous_response_id")) == len(turns)
    with pytest.raises(InvalidArgumentError, match="more than 32768 turns"):
        await store.history("alice", "b", "previous_response_id")


async def has(store: ResponseStore, tenant: str, name: str) -> bool:
    try:
        return (await store.get(tenant, name)).response_id == name
    except NotFoundError:
        return False


async def test_what_a_tenant_has_not_used_for_longest_goes_first(make) -> None:
    store = make(3)
    for name in "abc":
        await store.put("alice", response(name))
        await store.put("bob", response(name))
    await store.history("alice", "a", "previous_response_id")
    await store.put("alice", response("d"))
    assert [name for name in "abcd" if await has(store, "alice", name)] == ["a", "c", "d"]
    assert all([await has(store, "bob", name) for name in "abc"])


async def test_beyond_the_bytes_the_tenant_with_most_gives_way(make) -> None:
    store = make(100, 20 * 5000)
    await store.put("bob", response("his", size=4096))
    for number in range(50):
        await store.put("alice", response(f"a{number}", size=4096))
    kept = [number for number in range(50) if await has(store, "alice", f"a{number}")]
    assert kept == list(range(50 - len(kept), 50)) and len(kept) in range(18, 22)
    assert await has(store, "bob", "his")
    sizes = [(await store._store.total(tenant, KEPT))[1] for tenant in ("alice", "bob")]
    assert 19 * 5000 - 4096 < sum(sizes) <= 20 * 5000
    await store.put("alice", response("huge", size=MUCH // 100))
    assert not await has(store, "alice", "huge") and await has(store, "alice", "a49")


async def test_a_history_is_told_from_its_beginning_and_only_to_its_own_tenant(make) -> None:
    store = make(10)
    await store.put("alice", response("a"))
    await store.put("alice", response("b", "a"))
    assert [turn.content for turn in await store.history("alice", "b", "x")] == ["a", "b"]
    for tenant, name in (("bob", "b"), ("alice", "c")):
        with pytest.raises(NotFoundError) as caught:
            await store.history(tenant, name, "x")
        assert caught.value.field == "x"
    await store.delete("alice", "a")
    with pytest.raises(NotFoundError, match="'a'"):
        await store.history("alice", "b", "x")
    with pytest.raises(NotFoundError):
        await store.delete("alice", "a")
    await store.delete("alice", "b")
    assert await store._store.total("alice", KEPT) == (0, 0)


async def test_a_chain_that_is_used_stays_whole(make) -> None:
    store = make(4)
    for name, previous in (("a", None), ("b", "a"), ("x", None), ("c", "b")):
        await store.put("", response(name, previous))
    await store.history("", "c", "x")
    await store.put("", response("d", "c"))
    assert [turn.content for turn in await store.history("", "d", "x")] == ["a", "b", "c", "d"]


async def test_none_is_kept_where_none_is_wanted(make) -> None:
    store = make(0)
    await store.put("", response("a"))
    assert (store.keeps, await has(store, "", "a")) == (False, False)
