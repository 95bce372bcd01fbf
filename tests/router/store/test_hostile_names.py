"""Names that clients give reach a store as they are: none of them is part of a statement, and tenants stay apart."""

from __future__ import annotations

from typing import Any

import pytest

from sapwood_router.store.records import Record

NAMES = [
    "'; DROP TABLE sapwood_records; --",
    "' OR '1'='1",
    "$1",
    "?",
    "%",
    "_",
    "*",
    "a|b",
    "sapwood:r:file",
    "\r\nFLUSHALL\r\n",
    "\u202e\x1b[31m",
    "é" * 64,
    "k" * 2000,
    " ",
    "\\",
    "{a}",
    "[a-z]",
]
ABSENT = ["\0", "a\0b", "response\0b\0x", "\ud800", "k" * 1_000_000]
"""Names that no record can have, which clients may ask for."""


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
async def test_a_name_is_a_key_and_a_tenant_and_nothing_else(open_one: Any, name: str) -> None:
    async with open_one() as store:
        await store.put([Record("response", "victim", "kept", b"mine")])
        await store.put([Record("conversation", "a", name, b"list")])
        await store.put([Record("item", "a", f"{name}/1", b"item", parent=name, position=1)])
        tenant = name[:128]
        await store.put([Record("response", tenant, "kept", b"theirs")])
        found = await store.get("conversation", "a", name)
        assert found is not None and found.body == b"list"
        assert [each.body for each in await store.below("item", "a", name)] == [b"item"]
        assert (await store.get("response", "victim", "kept")).body == b"mine"
        assert (await store.get("response", tenant, "kept")).body == b"theirs"
        assert (await store.total(tenant, "kept"))[0] == 1
        every = {(each.tenant, each.key) for each in await store.every("response")}
        assert every == {("victim", "kept"), (tenant, "kept")}
        assert await store.forget(tenant) == 1
        assert await store.delete("conversation", "a", name)
        assert await store.below("item", "a", name) == []
        assert (await store.get("response", "victim", "kept")).body == b"mine"


@pytest.mark.parametrize("name", ABSENT, ids=["NUL", "NUL within", "a place", "surrogate", "long"])
async def test_a_name_that_no_record_can_have_is_not_there(open_one: Any, name: str) -> None:
    async with open_one() as store:
        await store.put([Record("response", "b", "x", b"theirs"), Record("response", "a", "y", b"mine")])
        assert await store.get("response", "a", name) is None
        assert await store.chain("response", "a", name, 5) == []
        assert not await store.delete("response", "a", name)
        assert await store.below("item", "a", name) == []
        assert await store.positions("line", "a", name) == []
        assert (await store.get("response", "a", "y")).body == b"mine"


async def test_bytes_of_every_kind_and_many_megabytes_come_back(open_one: Any) -> None:
    async with open_one() as store:
        for body in (bytes(range(256)) * 4, b"", b"\0" * 16_000_000):
            await store.put([Record("file", "a", "f", body)])
            assert (await store.get("file", "a", "f")).body == body
