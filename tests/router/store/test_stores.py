"""All stores do the same: as a plain dictionary would, within their bounds, and each tenant for itself."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sapwood_common.errors import ConfigError, UnavailableError
from sapwood_router.store.opening import open_store
from sapwood_router.store.records import (
    CHILDREN,
    COUNTED,
    FILES,
    GROUPS,
    KEPT,
    MOST_AT_ONCE,
    PARENTS,
    Record,
    Retention,
)

KINDS, TENANTS, KEYS = sorted(GROUPS), ["", "alice", "bob"], ["a", "b", "c"]
STEPS = st.tuples(
    st.sampled_from(["put", "add", "swap", "delete", "forget"]),
    st.sampled_from(KINDS),
    st.sampled_from(TENANTS),
    st.sampled_from(KEYS),
    st.sampled_from(["", *KEYS]),
    st.integers(0, 3),
    st.binary(max_size=20),
)


class Model:
    """A dictionary of records."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str, str], Record] = {}

    def do(self, step: str, record: Record) -> Any:
        at = record.kind, record.tenant, record.key
        known = self.records.get(at)
        has_place = record.kind not in PARENTS or (PARENTS[record.kind], record.tenant, record.parent) in self.records
        if step == "put":
            if has_place:
                self._write(record, 0 if known is None else known.version + 1)
            return has_place
        if step == "add":
            if known is None and has_place:
                self._write(record, 0)
            return known is None and has_place
        if step == "swap":
            matches = known is not None and known.version == record.version and has_place
            if matches:
                self._write(record, record.version + 1)
            return matches
        if step == "delete":
            self.records.pop(at, None)
            if known is not None:
                self._drop(
                    lambda r: (r.kind, r.tenant, r.parent) == (CHILDREN.get(record.kind), record.tenant, record.key)
                )
            return known is not None
        return self._drop(lambda r: r.tenant == record.tenant)

    def _write(self, record: Record, version: int) -> None:
        content = record.body, record.parent, record.position, record.expires
        at = record.kind, record.tenant, record.key
        self.records[at] = Record(*at, *content, version)

    def _drop(self, which: Any) -> int:
        gone = [at for at, record in self.records.items() if which(record)]
        for at in gone:
            del self.records[at]
        return len(gone)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEPS, max_size=30))
def test_a_store_does_what_a_dictionary_does(open_one, steps) -> None:
    async def run() -> None:
        async with open_one() as store:
            for tenant in TENANTS:
                await store.forget(tenant)
            model = Model()
            for step, kind, tenant, key, parent, number, body in steps:
                record = Record(kind, tenant, key, body, parent, number, 0, number if step == "swap" else 0)
                if step == "put":
                    told = await store.put([record])
                elif step == "delete":
                    told = await store.delete(kind, tenant, key)
                elif step == "forget":
                    told = await store.forget(tenant)
                else:
                    told = await getattr(store, step)(record)
                assert told == model.do(step, record), (step, record)
            for kind in KINDS:
                of_kind = sorted((r for r in model.records.values() if r.kind == kind), key=lambda r: (r.tenant, r.key))
                assert await store.every(kind) == of_kind
                for tenant in TENANTS:
                    for parent in ("", *KEYS):
                        below = [r for r in of_kind if (r.tenant, r.parent) == (tenant, parent)]
                        below.sort(key=lambda r: (r.position, r.key))
                        assert await store.below(kind, tenant, parent) == below
                        assert await store.below(kind, tenant, parent, newest_first=True) == below[::-1]
                        for after in below:
                            place = after.position, after.key
                            later = [r for r in below if (r.position, r.key) > place]
                            assert await store.below(kind, tenant, parent, after=place, limit=1) == later[:1]
            for tenant in TENANTS:
                for group in (KEPT, FILES):
                    own = [r for r in model.records.values() if r.tenant == tenant and GROUPS[r.kind] == group]
                    counted = sum(r.kind in COUNTED for r in own)
                    assert await store.total(tenant, group) == (counted, sum(r.size for r in own))

    asyncio.run(run())


async def test_what_is_unused_for_too_long_goes_and_what_expires_too(open_one) -> None:
    now = 1000.0
    async with open_one(Retention(100, 10**9, seconds=60)) as store:
        store._clock = lambda: now
        await store.put([Record("response", "t", "old", b""), Record("conversation", "t", "used", b"")])
        await store.put([Record("item", "t", "used/1", b"", "used", 1), Record("file", "t", "f", b"", expires=1050)])
        await store.put([Record("chunk", "t", "f/0", b"", "f", 0), Record("batch", "t", "b", b"")])
        now = 1049.0
        await store.sweep()
        assert len(await store.chain("conversation", "t", "used", 1)) == 1
        now = 1062.0
        await store.sweep()
        left = [record.key for kind in KINDS for record in await store.every(kind)]
        assert sorted(left) == ["b", "used", "used/1"]
        now = 2000.0
        await store.sweep()
        assert [record.key for kind in KINDS for record in await store.every(kind)] == ["b"]


async def test_of_many_who_swap_one_version_one_does(open_one) -> None:
    async with open_one() as store:
        await store.put([Record("job", "t", "j", b"")])
        swapped = await asyncio.gather(*(store.swap(Record("job", "t", "j", b"%d" % n)) for n in range(10)))
        assert sum(swapped) == 1
        found = await store.get("job", "t", "j")
        assert (found.version, found.body) == (1, b"%d" % swapped.index(True))


async def test_a_write_of_several_records_is_whole_or_not_at_all(open_one) -> None:
    async with open_one() as store:
        wrong = Record("response", "t", "b", None)  # type: ignore[arg-type]
        with pytest.raises((UnavailableError, TypeError, AttributeError)):
            await store.put([Record("response", "t", "a", b""), wrong])
        assert await store.every("response") == []
        await store.put([Record("response", "t", "c", b"")])
        assert [record.key for record in await store.every("response")] == ["c"]


async def test_nothing_is_put_below_what_is_not_there(open_one) -> None:
    async with open_one() as store:
        for parent, child in CHILDREN.items():
            below = Record(child, "t", "c", bytes(9000), "p", 1)
            assert not await store.put([below, Record(parent, "t", "other", b"")])
            assert not await store.add(below)
            assert not await store.put([Record(child, "u", "c", b"", "p", 1)]), "a parent of another tenant is none"
            assert await store.every(child) == []
            assert await store.put([Record(parent, "t", "p", b""), below])
            assert not await store.swap(Record(child, "t", "c", b"", "q", 1))
            assert await store.delete(parent, "t", "p")
            assert not await store.put([below])
            assert await store.every(child) == []


async def test_a_file_is_read_again_and_by_its_owner_alone(tmp_path) -> None:
    path = tmp_path / "below" / "store.sqlite"
    retention = Retention(10, 10**9)
    first, second = (open_store(f"sqlite:{path}", 0, retention) for _ in range(2))
    await first.put([Record("response", "t", "a", b"body"), Record("batch", "t", "b", b"")])
    assert (await second.get("response", "t", "a")).body == b"body"
    await asyncio.gather(
        *(store.add(Record("line", "t", f"{n}", b"", "b")) for n in range(200) for store in (first, second))
    )
    assert len(await first.every("line", limit=1000)) == 200
    await first.close()
    await second.close()
    with pytest.raises(UnavailableError, match="closed"):
        await first.get("response", "t", "a")
    assert path.stat().st_mode & 0o777 == 0o600
    third = open_store(f"sqlite:{path}", 0, retention)
    assert (await third.get("response", "t", "a")).body == b"body"
    await third.close()


async def test_a_store_that_cannot_be_opened_is_named(tmp_path) -> None:
    (tmp_path / "file").write_text("no database" * 100)
    for url in (f"sqlite:{tmp_path}/file", f"sqlite:{tmp_path}/file/below", "elsewhere:x", "redis://127.0.0.1:x/0"):
        with pytest.raises(ConfigError, match="--store"):
            open_store(url, 0, Retention(1, 1))


async def test_a_file_that_others_may_read_is_warned_about(tmp_path, caplog: pytest.LogCaptureFixture) -> None:
    for mode, warns in ((0o600, False), (0o644, True)):
        path = tmp_path / f"{mode:o}.sqlite"
        path.touch()
        path.chmod(mode)
        caplog.clear()
        await open_store(f"sqlite:{path}", 0, Retention(1, 1000)).close()
        assert ("read by other users" in caplog.text) is warns


async def test_a_redis_that_is_away_is_unavailable_and_comes_back(redis_url) -> None:
    away = open_store("redis://127.0.0.1:1/0", 0, Retention(10, 10**9))
    for asked in (away.get("response", "t", "a"), away.put([Record("response", "t", "a", b"")]), away.sweep()):
        with pytest.raises(UnavailableError, match="does not answer"):
            await asked
    await away.close()
    store = open_store(redis_url, 0, Retention(10, 10**9))
    await store.put([Record("response", "t", "a", b"1")])
    await store._client.connection_pool.disconnect()
    assert (await store.get("response", "t", "a")).body == b"1"
    await store.close()
    with pytest.raises(UnavailableError, match="closed"):
        await store.get("response", "t", "a")


async def test_nothing_of_a_tenant_is_left_in_redis_after_it_is_forgotten(redis_url) -> None:
    import redis

    async def keys() -> set[bytes]:
        with redis.Redis.from_url(redis_url) as client:
            return set(client.keys("*"))

    store = open_store(redis_url, 0, Retention(10, 10**9))
    await store.put([Record(kind, "t", "a", b"body", "a", 7, 99) for kind in GROUPS])
    await store.put([Record("file", "t", "f", b""), Record("chunk", "t", "f/0", b"", "f", 0)])
    assert await keys()
    assert await store.forget("t") == len(GROUPS) + 2
    left = await keys()
    assert left <= {b"sapwood:z:kept", b"sapwood:z:files", b"sapwood:z:sessions"}, left
    with redis.Redis.from_url(redis_url) as client:
        assert {client.get(key) for key in left} <= {b"0"}
    await store.close()


async def test_routers_that_share_a_redis_see_each_others_records(redis_url) -> None:
    first, second = (open_store(redis_url, 0, Retention(10, 10**9)) for _ in range(2))
    batch = Record("batch", "t", "b", b"")
    await first.put([batch])
    await asyncio.gather(
        *(store.add(Record("line", "t", f"{n}", b"", "b")) for n in range(200) for store in (first, second))
    )
    assert len(await first.every("line", limit=1000)) == 200
    assert await second.total("t", FILES) == (1, 201 * batch.size)
    await first.close()
    await second.close()


@pytest.mark.slow  # hundreds of megabytes
async def test_one_call_gives_no_more_large_records_than_fit_into_memory(open_one) -> None:
    body = bytes(MOST_AT_ONCE * 2 // 5)
    async with open_one() as store:
        await store.put([Record("conversation", "a", "c", b"")])
        for number in range(5):
            parent = f"r{number - 1}" if number else ""
            await store.put([Record("item", "a", f"i{number}", body, parent="c", position=number)])
            await store.put([Record("response", "a", f"r{number}", body, parent=parent)])
        first = await store.below("item", "a", "c", limit=100)
        assert [each.key for each in first] == ["i0", "i1", "i2"]
        rest = await store.below("item", "a", "c", after=(2, "i2"), limit=100)
        assert [each.key for each in rest] == ["i3", "i4"]
        assert [each.key for each in await store.below("item", "a", "c", limit=100, newest_first=True)] == [
            "i4",
            "i3",
            "i2",
        ]
        assert [each.key for each in await store.below("item", "a", "c", limit=1)] == ["i0"]
        assert [each.key for each in await store.chain("response", "a", "r4", 100)] == ["r4", "r3", "r2"]
