"""Batches in a router's process: what is checked, answered, refused for now, cancelled, expired, and gone on with."""

from __future__ import annotations

import asyncio
import json
import sys
import time

import openai
import pytest

from sapwood_common.tenants.api_keys import hash_key, make_key
from sapwood_router.edges.batches.records import BatchObject, BatchStore
from tests.router.edges.batches.conftest import jsonl, line

CHAT = "/v1/chat/completions"


async def test_each_line_is_answered_in_order_with_its_custom_id(make_cluster, begin, ended) -> None:
    async with make_cluster(2) as cluster:
        begun = await begin(cluster.openai, *map(line, range(100)))
        assert (begun.object, begun.status, begun.endpoint) == ("batch", "validating", "/v1/completions")
        batch, output, errors = await ended(cluster.openai, begun.id)
        assert (batch.status, errors, batch.error_file_id) == ("completed", {}, None)
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (100, 100, 0)
        assert list(output) == [f"line-{number}" for number in range(100)]
        texts = [each["response"]["body"]["choices"][0]["text"] for each in output.values()]
        assert texts == [f"say {number}" for number in range(100)]
        assert {each["response"]["status_code"] for each in output.values()} == {200}
        assert all(each["response"]["request_id"] and each["error"] is None for each in output.values())
        assert (await cluster.openai.files.retrieve(batch.output_file_id)).purpose == "batch_output"
        assert [each.id async for each in await cluster.openai.batches.list()] == [begun.id]
        store = cluster.router._store
        assert await store.every("job") == [] and await store.every("line") == []
        assert await cluster.http.get(f"/v1/batches/{begun.id}/other") is not None
        with pytest.raises(openai.BadRequestError, match="completed"):
            await cluster.openai.batches.cancel(begun.id)


async def test_batches_are_listed_page_by_page(make_cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    async with make_cluster(1, batches=0) as cluster:
        client, store = cluster.openai, BatchStore(cluster.router._store)
        made = [
            BatchObject(id=f"batch_{number}", endpoint=CHAT, input_file_id="f", completion_window="1h", created_at=number,
                        expires_at=number)
            for number in range(7)
        ]  # fmt: skip
        for each in made:
            await store.create("", each)
        await store.create("other", BatchObject("batch_x", CHAT, "f", "1h", 1, 1))
        names = [each.id for each in made]
        sizes: list[int] = []
        below = cluster.router._store.below

        async def counted(*arguments, **options):
            found = await below(*arguments, **options)
            sizes.append(len(found))
            return found

        monkeypatch.setattr(cluster.router._store, "below", counted)
        page = await client.batches.list(limit=3)
        assert [each.id for each in page.data] == names[:3:-1]
        assert page.has_more and sizes == [4]
        assert [each.id async for each in page] == names[::-1]
        assert [each.id async for each in await client.batches.list(limit=3, extra_query={"order": "asc"})] == names
        last = await client.batches.list(limit=4, after=names[4])
        assert ([each.id for each in last.data], last.has_more) == (names[3::-1], False)
        assert max(sizes) <= 5, "no page reads the whole list"
        for query in ({"after": "batch_x"}, {"limit": 0}, {"limit": 101}, {"extra_query": {"order": "up"}}):
            with pytest.raises((openai.NotFoundError, openai.BadRequestError)):
                await client.batches.list(**query)


@pytest.mark.parametrize(
    ("endpoint", "body", "read"),
    [
        (
            CHAT,
            {"model": "fake", "messages": [{"role": "user", "content": "hi"}]},
            lambda b: b["choices"][0]["message"],
        ),
        ("/v1/responses", {"model": "fake", "input": "hi"}, lambda b: b["output"][0]["content"][0]["text"]),
        ("/v1/embeddings", {"model": "fake", "input": "hi"}, lambda b: b["data"][0]["embedding"]),
        (
            "/v1/messages",
            {"model": "fake", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
            lambda b: b["content"][0]["text"],
        ),
    ],
)
async def test_lines_of_every_api_are_answered(make_cluster, begin, ended, endpoint, body, read) -> None:
    async with make_cluster(1) as cluster:
        begun = await begin(cluster.openai, line(1, endpoint, **body), endpoint=endpoint)
        batch, output, errors = await ended(cluster.openai, begun.id)
        assert (batch.status, errors) == ("completed", {})
        assert read(output["line-1"]["response"]["body"])


async def test_all_lines_are_checked_before_any_is_run(make_cluster, begin, ended) -> None:
    wrong = [
        (b"{broken\n", "invalid_json_line", None),
        (b'{"custom_id": "a"}\n', "invalid_line", None),
        (line(0), "duplicate_custom_id", "custom_id"),
        ({**line(2), "url": CHAT}, "mismatched_url", "url"),
        ({**line(3), "method": "GET"}, "invalid_method", "method"),
        ({**line(4), "custom_id": ""}, "invalid_custom_id", "custom_id"),
        (line(5, prompt="x", stream=True), "invalid_body", "body.stream"),
        (line(6, prompt="x", max_tokens="many"), "invalid_body", "body"),
        (b'{"custom_id": "\xff", "url": "/v1/completions", "body": {}}\n', "invalid_json_line", None),
        (line(7, prompt="x" * 70_000), "line_too_long", None),
    ]
    async with make_cluster(1, max_body_bytes=60_000) as cluster:
        begun = await begin(cluster.openai, line(0), b"\n", *(given for given, _, _ in wrong))
        batch, output, errors = await ended(cluster.openai, begun.id)
        assert (batch.status, output, errors, batch.failed_at is not None) == ("failed", {}, {}, True)
        told = [(problem.line, problem.code, problem.param) for problem in batch.errors.data]
        assert told == [(number, code, param) for number, (_, code, param) in enumerate(wrong, 3)]
        assert cluster.calls() == []
        empty = await begin(cluster.openai, b"\n\n")
        batch, _, _ = await ended(cluster.openai, empty.id)
        assert [problem.code for problem in batch.errors.data] == ["empty_file"]


async def test_a_batch_of_too_many_lines_is_refused(make_cluster, begin, ended) -> None:
    async with make_cluster(1, batches="4,lines=3") as cluster:
        begun = await begin(cluster.openai, *map(line, range(4)))
        batch, _, _ = await ended(cluster.openai, begun.id)
        assert [(problem.line, problem.code) for problem in batch.errors.data] == [(4, "too_many_lines")]


async def test_wrong_requests_for_batches_name_the_field(make_cluster) -> None:
    async with make_cluster(1) as cluster:
        file = await cluster.openai.files.create(file=("a", b"x"), purpose="user_data")
        fine = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
        for change, status, param in (
            ({"endpoint": "/v1/other"}, 400, "endpoint"),
            ({"input_file_id": "file-none"}, 404, "input_file_id"),
            ({}, 400, "input_file_id"),
        ):
            answer = await cluster.http.post("/v1/batches", json=fine | change)
            assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
        file = await cluster.openai.files.create(file=("a", b"x"), purpose="batch")
        for window in ("soon", "0h", "999d"):
            answer = await cluster.http.post(
                "/v1/batches", json=fine | {"input_file_id": file.id, "completion_window": window}
            )
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "completion_window")
        for metadata in ({"a": "b" * 513}, {"a" * 65: "b"}, {str(number): "b" for number in range(17)}):
            answer = await cluster.http.post(
                "/v1/batches", json=fine | {"input_file_id": file.id, "metadata": metadata}
            )
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "metadata")


async def test_batches_count_as_bytes_that_a_tenant_may_have(make_cluster) -> None:
    async with make_cluster(1, store="memory,files=10000", batches=0) as cluster:
        file = await cluster.openai.files.create(file=("a", b"x"), purpose="batch")
        made = 0
        with pytest.raises(openai.RateLimitError, match="10000 bytes"):
            for _ in range(100):
                await cluster.openai.batches.create(
                    input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
                )
                made += 1
        assert 2 <= made <= 10


async def test_lines_that_fail_are_in_the_file_of_errors(make_cluster, begin, ended) -> None:
    async with make_cluster(1) as cluster:
        lines = [line(0), line(1, model="none", prompt="x"), line(2), line(3, model="fake", prompt="x", temperature=-1)]
        begun = await begin(cluster.openai, *lines)
        batch, output, errors = await ended(cluster.openai, begun.id)
        assert (batch.status, [*output], [*errors]) == ("completed", ["line-0", "line-2"], ["line-1", "line-3"])
        assert [each["response"]["status_code"] for each in errors.values()] == [404, 400]
        assert errors["line-3"]["response"]["body"]["error"]["param"] == "temperature"
        assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 2)


async def test_at_most_so_many_lines_run_at_a_time_with_the_lowest_priority(
    make_cluster, begin, ended, wait_until
) -> None:
    async with make_cluster(1, batches=3) as cluster:
        gate = cluster.workers[0].script.gate = asyncio.Event()
        begun = await begin(cluster.openai, *map(line, range(10)))
        await wait_until(lambda: len(cluster.calls()) == 3)
        other = await begin(cluster.openai, *map(line, range(10)))
        await asyncio.sleep(1.5)  # the other batch was looked at, and has no place
        assert len(cluster.calls()) == 3
        assert {call.request.priority for call in cluster.calls()} == {-100}
        gate.set()
        for each in (begun, other):
            batch, output, _ = await ended(cluster.openai, each.id)
            assert (batch.status, len(output)) == ("completed", 10)


async def test_a_cancelled_batch_keeps_the_results_that_are_there(make_cluster, begin, ended, wait_until) -> None:
    async with make_cluster(1, batches=1) as cluster:
        gate = asyncio.Event()
        gate.set()
        script = cluster.workers[0].script
        begun = await begin(cluster.openai, *map(line, range(5)))
        await wait_until(lambda: len(cluster.calls()) >= 1)
        script.gate = asyncio.Event()
        await asyncio.sleep(0.2)
        cancelling = await cluster.openai.batches.cancel(begun.id)
        assert cancelling.status == "cancelling"
        batch, output, errors = await ended(cluster.openai, begun.id)
        assert (batch.status, errors) == ("cancelled", {})
        assert batch.request_counts.completed == len(output) and batch.cancelled_at is not None
        await wait_until(lambda: all(call.outcome != "running" for call in cluster.calls()))
        script.gate = None


async def test_what_is_not_answered_in_its_window_has_expired(make_cluster, begin, ended, monkeypatch) -> None:
    async with make_cluster(1, batches=1) as cluster:
        cluster.workers[0].script.gate = asyncio.Event()
        begun = await begin(cluster.openai, *map(line, range(3)), window="1m")
        await asyncio.sleep(0.3)
        batches = cluster.router._batch_runner._batches

        def sooner(batch) -> bool:
            batch.expires_at = int(time.time()) - 1
            return True

        await batches.change("", begun.id, sooner)
        batch, output, errors = await ended(cluster.openai, begun.id)
        assert (batch.status, output, [*errors]) == ("expired", {}, ["line-0", "line-1", "line-2"])
        assert {each["error"]["code"] for each in errors.values()} == {"batch_expired"}


async def test_lines_that_are_refused_for_now_are_asked_again(make_cluster, begin, ended, tmp_path) -> None:
    key = make_key()
    path = tmp_path / "keys"
    path.write_text(f"alice {hash_key(key)} 600\n")  # ten a second
    async with make_cluster(1, api_keys=path, batches=8) as cluster:
        client = cluster.openai.with_options(api_key=key, max_retries=5)
        begun = await begin(client, *map(line, range(40)))
        await asyncio.sleep(0.5)
        cluster.workers[0].script.gate = None
        batch, output, errors = await ended(client, begun.id)
        assert (batch.status, len(output), errors) == ("completed", 40, {})


async def test_lines_of_a_revoked_key_are_answered_with_401(make_cluster, begin, ended, tmp_path) -> None:
    keys = {name: make_key() for name in ("alice", "bob")}
    path = tmp_path / "keys"
    told = {name: f"{name} {hash_key(key)}\n" for name, key in keys.items()}
    path.write_text("".join(told.values()))
    async with make_cluster(1, api_keys=path, batches=1) as cluster:
        alice = cluster.openai.with_options(api_key=keys["alice"])
        gate = cluster.workers[0].script.gate = asyncio.Event()
        begun = await begin(alice, *map(line, range(3)))
        await asyncio.sleep(0.3)
        path.write_text(told["bob"])
        cluster.router._keys.refresh()
        gate.set()
        store, batch = cluster.router._batch_runner._batches, None
        async with asyncio.timeout(60):
            while (batch := await store.get("alice", begun.id)).status != "completed":
                await asyncio.sleep(0.05)
        assert batch.request_counts.failed >= 2


async def test_a_batch_goes_on_in_another_router(make_cluster, begin, ended, tmp_path, wait_until) -> None:
    url = f"sqlite:{tmp_path}/store.sqlite"
    async with make_cluster(1, store=url, batches=2) as cluster:
        begun = await begin(cluster.openai, *map(line, range(30)))
        await wait_until(lambda: len(cluster.calls()) >= 10)
        cluster.workers[0].script.gate = asyncio.Event()
        await asyncio.sleep(0.2)
        first = len([call for call in cluster.calls() if call.outcome == "finished"])
    async with make_cluster(1, store=url) as cluster:
        batch, output, errors = await ended(cluster.openai, begun.id)
        assert (batch.status, len(output), errors) == ("completed", 30, {})
        assert list(output) == [f"line-{number}" for number in range(30)]
        assert len(cluster.calls()) <= 30 - first + 2, "what has a result is not asked again"


async def test_a_batch_whose_file_is_forgotten_fails(make_cluster, begin, ended, wait_until) -> None:
    async with make_cluster(1, batches=1) as cluster:
        gate = cluster.workers[0].script.gate = asyncio.Event()
        begun = await begin(cluster.openai, *map(line, range(3)))
        await wait_until(lambda: len(cluster.calls()) == 1)
        await cluster.openai.files.delete(begun.input_file_id)
        gate.set()
        batch, _, _ = await ended(cluster.openai, begun.id)
        assert (batch.status, [problem.code for problem in batch.errors.data]) == ("failed", ["input_file_deleted"])
        assert await cluster.router._store.every("job") == []


async def test_the_command_runs_lists_shows_and_cancels_batches(make_cluster, tmp_path) -> None:
    source, output, errors = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "errors.jsonl"))
    async with make_cluster(1) as cluster:

        async def sapwood(*words: str) -> tuple[int, str, str]:
            command = (sys.executable, "-m", "sapwood.cli.main", "batch", *words, "--url", cluster.url)
            process = await asyncio.create_subprocess_exec(
                *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
            )
            out, err = await process.communicate()
            return process.returncode, out.decode(), err.decode()

        source.write_bytes(jsonl(*map(line, range(5)), line(5, model="none", prompt="x")))
        code, _, told = await sapwood("run", str(source), "-o", str(output), "--errors", str(errors))
        assert (code, "completed: 5 of 6 lines answered, 1 failed" in told) == (1, True), told
        assert [json.loads(each)["custom_id"] for each in output.read_text().splitlines()] == [
            f"line-{number}" for number in range(5)
        ]
        assert json.loads(errors.read_text())["response"]["status_code"] == 404
        cluster.workers[0].script.gate = asyncio.Event()
        source.write_bytes(jsonl(line(1)))
        code, batch_id, _ = await sapwood("run", str(source), "--detach")
        assert code == 0 and batch_id.strip() in (await sapwood("list"))[1]
        assert json.loads((await sapwood("show", batch_id.strip()))[1])["id"] == batch_id.strip()
        assert (await sapwood("cancel", batch_id.strip()))[1] == "cancelling\n"
        code, _, told = await sapwood("show", "batch_none")
        assert (code, "there is no batch" in told) == (2, True)
