"""Files by OpenAI's client, and forms that are wrong."""

from __future__ import annotations

import asyncio

import httpx
import msgspec
import openai
import pytest

from sapwood_common.tenants.api_keys import hash_key, make_key
from sapwood_router.edges.files.store import FileObject
from sapwood_router.store.records import Record

FILES = "/v1/files"


async def test_a_file_is_kept_listed_read_and_forgotten(make_cluster, tmp_path) -> None:
    content = b"".join(b'{"line": %d}\n' % number for number in range(100_000))  # several chunks
    async with make_cluster(1) as cluster:
        client = cluster.openai.files
        made = await client.create(file=("in.jsonl", content), purpose="batch")
        assert (made.bytes, made.filename, made.purpose, made.status) == (
            len(content),
            "in.jsonl",
            "batch",
            "processed",
        )
        assert await client.retrieve(made.id) == made
        assert (await client.content(made.id)).content == content
        other = await client.create(
            file=("ü.txt", b"x"), purpose="user_data", expires_after={"anchor": "created_at", "seconds": 3600}
        )
        assert other.filename == "ü.txt" and 3590 <= other.expires_at - other.created_at <= 3610
        assert {file.id async for file in await client.list()} == {made.id, other.id}
        assert [file.id async for file in await client.list(purpose="user_data")] == [other.id]
        empty = await client.create(file=("empty", b""), purpose="batch")
        assert (await client.content(empty.id)).content == b"" and empty.bytes == 0
        gone = await client.delete(made.id)
        assert (gone.id, gone.deleted) == (made.id, True)
        for call in (client.retrieve(made.id), client.content(made.id), client.delete(made.id)):
            with pytest.raises(openai.NotFoundError):
                await call
        assert {record.parent for record in await cluster.router._store.every("chunk")} == {other.id}


async def test_forms_that_are_wrong_name_the_field_and_leave_nothing(make_cluster) -> None:
    async with make_cluster(1, max_body_bytes=4096) as cluster:
        file = {"file": ("a", b"x" * 300_000)}
        soon = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "5"}
        for data, files, param in (
            ({"purpose": "fun"}, file, "purpose"),
            ({}, file, "purpose"),
            ({"purpose": "batch"}, {"other": ("a", b"x")}, "file"),
            ({"purpose": "batch", "expires_after[seconds]": "5"}, file, "expires_after.anchor"),
            (
                {"purpose": "batch", **soon},
                file,
                "expires_after.seconds",
            ),
            *(
                ({"purpose": "batch", **soon, "expires_after[seconds]": seconds}, file, "expires_after.seconds")
                for seconds in ("000003600" + "0" * 12, "000003600" + "0" * 900, "-3600", "٣٦٠٠")
            ),
            ({"purpose": "b" * 2000}, {"file": ("a", b"x")}, "purpose"),
        ):
            answer = await cluster.http.post(FILES, data=data, files=files)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
        answer = await cluster.http.post(FILES, json={"purpose": "batch"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (415, "content-type")
        head = {"content-type": "multipart/form-data; boundary=x"}
        for body in (
            b"no form at all",
            b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nhalf',
        ):
            answer = await cluster.http.post(FILES, content=body, headers=head)
            assert answer.status_code == 400, answer.text
        long = {"content-type": f"multipart/form-data; boundary={'x' * 300}"}
        answer = await cluster.http.post(FILES, content=b"x", headers=long)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "content-type")
        parts = b"--x\r\nA: b\r\n\r\n\r\n" * 40
        answer = await cluster.http.post(FILES, content=parts, headers=head)
        assert answer.status_code == 400 and "32 parts" in answer.text
        answer = await cluster.http.post(FILES, content=b"--x\r\n" + b"A" * 2000 + b": b\r\n\r\n", headers=head)
        assert answer.status_code == 400 and "header of the form is too long" in answer.text
        for kind in ("file", "chunk"):
            assert await cluster.router._store.every(kind) == []


async def test_a_tenants_bytes_have_a_bound(make_cluster) -> None:
    async with make_cluster(1, store="memory,files=1000000") as cluster:
        files = cluster.openai.files
        first = await files.create(file=("a", b"x" * 600_000), purpose="batch")
        for _ in range(2):
            with pytest.raises(openai.RateLimitError, match="1000000 bytes"):
                await files.create(file=("b", b"x" * 600_000), purpose="batch")
        await files.delete(first.id)
        await files.create(file=("b", b"x" * 600_000), purpose="batch")


async def test_an_upload_that_breaks_off_leaves_nothing(make_cluster, wait_until) -> None:
    async def pieces():
        yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + b"y" * 600_000
        raise httpx.WriteError("the client leaves")

    async with make_cluster(1) as cluster:
        with pytest.raises(httpx.HTTPError):
            await cluster.http.post(
                FILES, content=pieces(), headers={"content-type": "multipart/form-data; boundary=x"}
            )
        store = cluster.router._store

        async def left() -> int:
            return len(await store.every("file")) + len(await store.every("chunk"))

        while await left():
            pass


async def test_an_upload_whose_file_is_forgotten_meanwhile_fails_and_leaves_nothing(make_cluster, wait_until) -> None:
    async with make_cluster(1) as cluster:
        store = cluster.router._store

        async def pieces(rest: int):
            yield b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + b"y" * 300_000
            while not await store.every("chunk"):
                await asyncio.sleep(0.01)
            await store.forget("")  # as when it expires
            yield b"y" * rest + b"\r\n--x--\r\n"

        for rest in (300_000, 0):
            answer = await cluster.http.post(
                FILES, content=pieces(rest), headers={"content-type": "multipart/form-data; boundary=x"}
            )
            assert answer.status_code == 404
            assert "was deleted before" in answer.text
            assert await store.every("file") == await store.every("chunk") == []


async def test_files_of_other_tenants_are_not_there(make_cluster, tmp_path) -> None:
    keys = {name: make_key() for name in ("alice", "bob")}
    path = tmp_path / "keys"
    path.write_text("".join(f"{name} {hash_key(key)}\n" for name, key in keys.items()))
    async with make_cluster(1, api_keys=path) as cluster:
        alice, bob = (cluster.openai.with_options(api_key=keys[name]) for name in keys)
        made = await alice.files.create(file=("a", b"x"), purpose="batch")
        assert [file.id async for file in await bob.files.list()] == []
        batch = {"input_file_id": made.id, "endpoint": "/v1/completions", "completion_window": "24h"}
        for call in (
            bob.files.retrieve(made.id),
            bob.files.content(made.id),
            bob.files.delete(made.id),
            bob.batches.create(**batch),
        ):
            with pytest.raises(openai.NotFoundError):
                await call
        begun = await alice.batches.create(**batch)
        for call in (bob.batches.retrieve(begun.id), bob.batches.cancel(begun.id)):
            with pytest.raises(openai.NotFoundError):
                await call
        assert (await alice.files.content(made.id)).content == b"x"


async def test_files_are_listed_page_by_page(make_cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    async with make_cluster(1) as cluster:
        client, store = cluster.openai, cluster.router._store
        files = [
            FileObject(f"file-{number:04}", 1, number // 3, "n", "batch" if number % 2 else "evals", "processed")
            for number in range(1200)
        ]
        files[7].status = "uploaded"
        await store.put(
            [Record("file", "", each.id, msgspec.json.encode(each), position=each.created_at) for each in files]
        )
        names = [each.id for each in files if each.status == "processed"]
        sizes: list[int] = []
        below = store.below

        async def counted(*arguments, **options):
            found = await below(*arguments, **options)
            sizes.append(len(found))
            return found

        monkeypatch.setattr(store, "below", counted)
        page = await client.files.list(limit=3)
        assert [each.id for each in page.data] == names[:-4:-1]
        assert page.has_more and max(sizes) <= 500 and len(sizes) == 1, "no page reads the whole list"
        assert [each.id async for each in await client.files.list(limit=250)] == names[::-1]
        assert [each.id async for each in await client.files.list(order="asc", limit=700)] == names
        evals = [each.id async for each in await client.files.list(order="asc", purpose="evals", limit=100)]
        assert evals == [each.id for each in files if each.purpose == "evals"]
        with pytest.raises(openai.NotFoundError):
            await client.files.list(after="file-x")
