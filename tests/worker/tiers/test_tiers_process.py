"""Whole workers over a shared store, one of files and a real Mooncake: restarts, cold starts, and what is killed meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from itertools import islice
from pathlib import Path
from typing import Any

import grpc
import pytest

from sapwood.cli.main import main
from sapwood.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from sapwood_common.contract.sampling import SamplingParams
from sapwood_testing.worker.fake_runner import continuation
from sapwood_testing.worker.storage.mooncake_cluster import MooncakeCluster

VOCAB = 1000
TIERS = ("--host-cache", "ratio=2", "--storage-prefetch", "wait_complete,min_tokens=16")
PROMPT = list(range(100, 515))  # 25 whole pages of 16 and some


@pytest.fixture
def files(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store?size_gb=1"


@pytest.fixture
def nixl(tmp_path: Path) -> str:
    if importlib.util.find_spec("nixl_cu12") is None and importlib.util.find_spec("nixl") is None:
        pytest.skip("NIXL is not installed")
    return f"nixl://posix{tmp_path}/store?size_gb=1"


@pytest.fixture(params=["files", *(pytest.param(name, marks=pytest.mark.slow) for name in ("nixl", "mooncake"))])
def store(request: pytest.FixtureRequest) -> str:
    """The URL of a store that workers share."""
    found = request.getfixturevalue(request.param)
    return found if isinstance(found, str) else str(found.url)


@contextlib.asynccontextmanager
async def stub_of(worker: Any) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(worker.address) as channel:
        yield worker_pb2_grpc.WorkerStub(channel)


async def ask(stub: Any, name: str, prompt: list[int], count: int = 4) -> int:
    """Asks for ``count`` tokens, checks them, and returns how many of the prompt were cached."""
    sampling = common_pb2.SamplingParams(seed=11, max_tokens=count)
    tokens: list[int] = []
    async for response in stub.Generate(
        worker_pb2.WorkerGenerateRequest(request_id=name, token_ids=prompt, sampling=sampling)
    ):
        tokens += response.token_ids
    assert tokens == list(islice(continuation(prompt, SamplingParams(seed=11), VOCAB), count))
    cached: int = response.usage.cached_tokens
    return cached


async def tier(stub: Any, number: int) -> Any:
    return next(
        each for each in (await stub.GetCacheStats(worker_pb2.GetCacheStatsRequest())).tiers if each.tier == number
    )


async def stored(stub: Any, count: int) -> None:
    """Waits until so many bytes have been written to the store."""
    while (await tier(stub, worker_pb2.CACHE_TIER_STORAGE)).bytes_in < count:
        await asyncio.sleep(0.02)


async def test_a_workers_death_amid_transfers_fails_no_request(start: Any, store: str) -> None:
    dying, living = (start(*TIERS, "--storage", store) for _ in range(2))
    prompts = [[index, *PROMPT] for index in range(40)]

    async def until_it_dies(stub: Any) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            for index, prompt in enumerate(prompts * 3):
                await ask(stub, f"d{index}", prompt)

    async with stub_of(dying) as doomed, stub_of(living) as stub:
        dooms = asyncio.ensure_future(until_it_dies(doomed))
        await asyncio.wait(
            {dooms, asyncio.ensure_future(stored(doomed, 25 * 16 * 8 * 3))}, return_when="FIRST_COMPLETED"
        )
        if dooms.done():
            await dooms
        asks = [asyncio.ensure_future(ask(stub, f"l{index}", prompt)) for index, prompt in enumerate(prompts)]
        os.kill(dying.scheduler_pid(), signal.SIGKILL)
        await asyncio.gather(*asks)
        await dooms
        again = await asyncio.gather(*(ask(stub, f"m{index}", prompt) for index, prompt in enumerate(prompts)))
        assert min(again) == 400
        before = (await tier(stub, worker_pb2.CACHE_TIER_STORAGE)).bytes_in
        assert await ask(stub, "n", PROMPT) == 0
        await stored(stub, before + 25 * 16 * 8)
        theirs = (await stub.WatchLoad(worker_pb2.WatchLoadRequest()).read()).load.storage_id
    async with stub_of(start(*TIERS, "--storage", store)) as stub:
        assert await ask(stub, "a", [*PROMPT, 7]) == 400
        storage = await tier(stub, worker_pb2.CACHE_TIER_STORAGE)
        assert (storage.hit_tokens, storage.failures, storage.rejected_pages) == (400, 0, 0)
        assert storage.state == "attached"
        async for response in stub.WatchLoad(worker_pb2.WatchLoadRequest(interval_ms=10)):
            load = response.load
            if load.storage_hit_tokens == load.host_hit_tokens == 400:
                break
        assert 25 <= load.host_used_pages <= load.host_num_pages
        assert load.device_hit_tokens == 0
        assert load.storage_id == theirs != "", "a router would not know that they share it"


@pytest.mark.slow
async def test_the_masters_death_during_transfers_fails_no_request(start: Any, mooncake: MooncakeCluster) -> None:
    worker = start(*TIERS, "--storage", mooncake.url, "--num-pages", "64")
    prompts = [[index, *PROMPT] for index in range(40)]
    async with stub_of(worker) as stub:
        asks = [asyncio.ensure_future(ask(stub, f"a{index}", prompt)) for index, prompt in enumerate(prompts)]
        await stored(stub, 25 * 16 * 8 * 3)
        mooncake.kill_master()
        await asyncio.gather(*asks)
        await asyncio.gather(*(ask(stub, f"b{index}", prompt) for index, prompt in enumerate(prompts)))
        index = 0
        while not (storage := await tier(stub, worker_pb2.CACHE_TIER_STORAGE)).failures:  # calls may be under way yet
            await ask(stub, f"f{index}", [950 - index % 400, *PROMPT])
            index += 1
        mooncake.start_master()
        before = storage.bytes_in
        index = 0
        while (await tier(stub, worker_pb2.CACHE_TIER_STORAGE)).bytes_in == before:  # it comes back by itself
            await ask(stub, f"c{index}", [500 + index % 400, *PROMPT])
            index += 1


async def test_a_store_that_is_down_at_the_start_is_no_reason_not_to_start(start: Any) -> None:
    with socket.socket() as held:  # and listens to nobody
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        worker = start(*TIERS, "--storage", f"mooncake://127.0.0.1:{port}?metadata=http://127.0.0.1:{port}/metadata")
        async with stub_of(worker) as stub:
            assert await ask(stub, "a", PROMPT) == 0
            async with asyncio.timeout(120):
                while not (
                    storage := await tier(stub, worker_pb2.CACHE_TIER_STORAGE)
                ).error:  # the first try takes its time
                    await asyncio.sleep(0.05)
            assert storage.state == "opening"


def run_cli(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main(["cache", *arguments, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_an_operator_attaches_shows_clears_and_detaches(
    start: Any, files: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = start(*TIERS)
    at = ("--worker", worker.address)

    def cached(name: str) -> int:
        async def run() -> int:
            async with stub_of(worker) as stub:
                return await ask(stub, name, PROMPT)

        return asyncio.run(run())

    def objects() -> int:
        return sum(each.name.startswith("0" * 20) is False for each in tmp_path.glob("store/objects/*/*/*"))

    assert cached("a") == 0
    assert [each["state"] for each in run_cli(capsys, "stats", *at)] == ["", "", "none"]
    attached = run_cli(capsys, "attach", files, *at)
    assert attached[2]["url"] == files and attached[2]["state"] == "attached"
    device, host, _ = run_cli(capsys, "clear", "--tier", "device", *at)
    assert (device["pages"], host["pages"] > 0) == (0, True)
    assert cached("b") == 400, "the second tier was to be left alone"
    assert run_cli(capsys, "stats", *at)[1]["hit_tokens"] == 400
    run_cli(capsys, "clear", *at)
    assert cached("c") == 0, "all tiers were to be cleared"
    while objects() < 25:
        time.sleep(0.02)
    run_cli(capsys, "clear", "--tier", "device", "--tier", "host", *at)
    assert cached("d") == 400
    assert run_cli(capsys, "stats", *at)[2]["hit_tokens"] == 400
    run_cli(capsys, "clear", "--tier", "storage", *at)
    assert objects() == 0
    assert run_cli(capsys, "detach", *at)[2]["state"] == "none"
    run_cli(capsys, "clear", *at)
    assert cached("e") == 0
    assert main(["cache", "stats", *at]) == 0
    table = capsys.readouterr().out
    assert "hit tokens" in table and "storage" in table


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
async def test_a_flush_leaves_nothing_but_what_a_store_has(start: Any, files: str, policy: str) -> None:
    worker = start(*TIERS, "--host-cache", f"ratio=2,write={policy}")
    async with stub_of(worker) as stub:
        events = stub.SubscribeKvEvents(worker_pb2.SubscribeKvEventsRequest(token_ids=False))
        await events.read()  # the snapshot
        for number in range(8):  # at once, while the last pages are on their way to the host
            assert await ask(stub, f"a{number}", PROMPT) == 0
            await stub.FlushCache(worker_pb2.FlushCacheRequest())
        held: dict[int, set[bytes]] = {worker_pb2.KV_MEDIUM_GPU: set(), worker_pb2.KV_MEDIUM_CPU_TIER1: set()}
        removed = 0
        while removed < 8 * 25:
            message = await events.read()
            for event in message.events:
                if event.HasField("block_stored"):
                    held[event.block_stored.medium] |= set(event.block_stored.block_hashes)
                else:
                    assert event.HasField("block_removed"), "there are tiers that keep what they have"
                    held[event.block_removed.medium] -= set(event.block_removed.block_hashes)
                    removed += len(event.block_removed.block_hashes) * (
                        event.block_removed.medium == worker_pb2.KV_MEDIUM_GPU
                    )
        assert not any(held.values())
        assert message.digest == 0
        if policy == "write_through":
            await stub.AttachStorage(worker_pb2.AttachStorageRequest(url=files))
            await ask(stub, "b", PROMPT)
            await stored(stub, 25 * 16 * 8)
            await stub.FlushCache(worker_pb2.FlushCacheRequest())
            assert await ask(stub, "c", PROMPT) == 400


def test_what_cannot_be_done_is_said(start: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    worker = start(*TIERS)
    assert main(["cache", "attach", "nowhere", "--worker", worker.address]) == 2
    assert "names no kind of store" in capsys.readouterr().err
    assert main(["cache", "attach", f"file://{tmp_path}/file", "--worker", worker.address]) == 2
    assert "cannot use the folder" in capsys.readouterr().err
    assert main(["cache", "clear", "--tier", "storage", "--worker", worker.address]) == 2
    assert "no store is attached" in capsys.readouterr().err
    plain = start()
    assert main(["cache", "attach", f"file://{tmp_path}/x", "--worker", plain.address]) == 2
    assert "no second tier" in capsys.readouterr().err
    assert main(["cache", "stats", "--worker", plain.address]) == 0


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        ((*TIERS, "--storage", "nowhere"), 1, "--storage: 'nowhere' names no kind of store"),
        (("--storage", "file:///nowhere"), 2, "has no effect without a second tier: --host-cache"),
    ],
)
def test_a_wrong_storage_flag_ends_the_worker_with_its_reason(flags: tuple[str, ...], code: int, said: str) -> None:
    command = [sys.executable, "-m", "sapwood_testing.worker.fake_worker", "--port", "0", *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == code
    assert said in result.stderr
