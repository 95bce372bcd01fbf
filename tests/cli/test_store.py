"""``sapwood store``: what routers keep of a tenant is shown and deleted, and nothing of another."""

from __future__ import annotations

import asyncio

import pytest

from sapwood.cli.main import main
from sapwood_router.store.opening import open_store
from sapwood_router.store.records import Record, Retention


def test_a_tenant_is_shown_and_forgotten_and_no_other(tmp_path, capsys) -> None:
    url = f"sqlite:{tmp_path}/store.sqlite"

    async def fill() -> None:
        store = open_store(url, 0, Retention(10, 10**9))
        for tenant in ("alice", "bob"):
            await store.put([Record("response", tenant, "r", b"x"), Record("file", tenant, "f", b"x")])
            await store.put([Record("chunk", tenant, "f/0", b"x" * 100, "f"), Record("session", tenant, "s", b"x")])
        await store.close()

    asyncio.run(fill())
    assert main(["store", "show", url, "alice"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "responses and conversations: 1, 513 bytes",
        "files and batches: 1, 1125 bytes",
        "sessions: 1, 513 bytes",
    ]
    assert main(["store", "forget", f"{url},days=3", "alice"]) == 0
    assert capsys.readouterr().out == "4 records deleted\n"
    for tenant, kept in (("alice", "0, 0 bytes"), ("bob", "1, 513 bytes")):
        main(["store", "show", url, tenant])
        assert f"conversations: {kept}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("memory", "names the file"),
        ("sqlite", "names the file"),
        ("other:x", "is none of"),
        ("sqlite:/no/file", "there is no file"),
    ],
)
def test_a_store_that_is_none_is_refused(url, said, capsys) -> None:
    assert main(["store", "forget", url, "alice"]) == 2
    assert said in capsys.readouterr().err
