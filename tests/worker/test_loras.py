"""Adapters of a worker in processes of its own, without a model: the runner's tokens tell which adapter computed them."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import time
from itertools import islice
from pathlib import Path
from typing import Any

import grpc
import pytest

from sapwood.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from sapwood_common.contract.page_hash import cache_namespace, hash_pages
from sapwood_common.contract.sampling import SamplingParams
from sapwood_testing.worker.asking import collect
from sapwood_testing.worker.fake_runner import continuation, fake_digest, fake_lora, pooled_prompt

VOCAB = 1000
SEED = 3
PROMPT = [5, 6, 7, 8] * 10
SLOTS = ("--lora-slots", "2,rank=16")


def ask(name: str, lora: str = "", count: int = 5, prompt: list[int] | None = None, **more: Any) -> Any:
    sampling = common_pb2.SamplingParams(seed=SEED, max_tokens=count)
    return worker_pb2.WorkerGenerateRequest(
        request_id=name, token_ids=prompt or PROMPT, sampling=sampling, lora_name=lora, **more
    )


def expected(digest: bytes = b"", count: int = 5, prompt: list[int] | None = None) -> list[int]:
    return list(islice(continuation(prompt or PROMPT, SamplingParams(seed=SEED), VOCAB, digest), count))


def load(name: str, path: Path | str = "", **more: Any) -> worker_pb2.LoadLoraRequest:
    return worker_pb2.LoadLoraRequest(name=name, path=str(path), **more)


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), str(caught.value.details())


async def listed(stub: Any) -> dict[str, worker_pb2.LoraInfo]:
    return {each.state.name: each for each in (await stub.ListLoras(worker_pb2.ListLorasRequest())).loras}


async def bytes_become(stub: Any, wanted: int) -> None:
    async with asyncio.timeout(60):
        while (await stub.ListLoras(worker_pb2.ListLorasRequest())).host_bytes != wanted:
            await asyncio.sleep(0.02)


async def test_requests_name_adapters_and_each_gets_its_own_tokens_and_cache(start, tmp_path: Path) -> None:
    paths = {name: fake_lora(tmp_path / name, f"weights of {name}") for name in ("x", "y", "z")}
    worker = start("--lora", f"x={paths['x']}", f"y={paths['y']},pinned", *SLOTS)
    async with grpc.aio.insecure_channel(worker.address) as channel:
        stub: Any = worker_pb2_grpc.WorkerStub(channel)
        info = await stub.GetModelInfo(worker_pb2.GetModelInfoRequest())
        assert (info.lora_slots, info.max_lora_rank) == (2, 16)
        before = await listed(stub)
        assert before["x"].state.place == worker_pb2.LORA_PLACE_SOURCE and not before["x"].pinned
        assert before["y"].state.place == worker_pb2.LORA_PLACE_HOST and before["y"].pinned
        await stub.LoadLora(load("z", paths["z"]))
        for turn in range(2):
            names = ["", "x", "y", "z", "", "z"]
            answers = await asyncio.gather(
                *(collect(stub, ask(f"{turn}{place}", name)) for place, name in enumerate(names))
            )
            for name, (tokens, last) in zip(names, answers, strict=True):
                assert tokens == expected(fake_digest(paths[name]) if name else b"")
                assert (last.usage.cached_tokens > 0) or not turn
        found = await listed(stub)
        assert list(found) == ["x", "y", "z"]
        assert found["x"].state.digest == fake_digest(paths["x"]) and found["x"].rank == 8
        assert list(found["x"].modules) == ["self_attn.q_proj"] and found["x"].idle_seconds < 60
        report = await stub.ListLoras(worker_pb2.ListLorasRequest())
        assert (report.slots, report.free_slots, report.host_bytes) == (2, 2, 3 * 8000)
        states = [each.state.place for each in report.loras]
        assert sorted(states) == [
            worker_pb2.LORA_PLACE_HOST,
            worker_pb2.LORA_PLACE_DEVICE,
            worker_pb2.LORA_PLACE_DEVICE,
        ]


async def test_an_unknown_name_is_not_found_and_an_unloaded_one_is_nobody_elses(start, tmp_path: Path) -> None:
    path = fake_lora(tmp_path / "x", "weights")
    worker = start(*SLOTS)
    async with grpc.aio.insecure_channel(worker.address) as channel:
        stub: Any = worker_pb2_grpc.WorkerStub(channel)
        assert (await refusal(collect(stub, ask("1", "x"))))[0] == grpc.StatusCode.NOT_FOUND
        await stub.LoadLora(load("x", path))
        slow = stub.Generate(ask("slow", "x", count=3000, prompt=[1]))
        await slow.read()
        unloaded = await stub.UnloadLora(worker_pb2.UnloadLoraRequest(name="x"))
        assert unloaded.running_requests == 1
        assert (await refusal(collect(stub, ask("2", "x"))))[0] == grpc.StatusCode.NOT_FOUND
        assert (await refusal(stub.UnloadLora(worker_pb2.UnloadLoraRequest(name="x"))))[0] == grpc.StatusCode.NOT_FOUND
        got = [1]
        while (response := await slow.read()) is not grpc.aio.EOF:
            got += response.token_ids
        assert got[1:] == expected(fake_digest(path), 3000, [1])[-len(got) + 1 :]
        await bytes_become(stub, 0)


async def test_unloading_ends_requests_if_asked_and_frees_memory(start, tmp_path: Path) -> None:
    worker = start(*SLOTS, "--embedding-size", "1")
    async with grpc.aio.insecure_channel(worker.address) as channel:
        stub: Any = worker_pb2_grpc.WorkerStub(channel)
        await stub.LoadLora(load("x", fake_lora(tmp_path / "x", "weights")))
        slow = stub.Generate(ask("slow", "x", count=4000, prompt=[1]))
        await slow.read()
        await stub.UnloadLora(worker_pb2.UnloadLoraRequest(name="x", abort_requests=True))

        async def rest() -> None:
            while await slow.read() is not grpc.aio.EOF:
                pass

        assert (await refusal(rest()))[0] == grpc.StatusCode.CANCELLED
        await bytes_become(stub, 0)


async def test_reloading_under_one_name_meets_no_old_pages(start, tmp_path: Path) -> None:
    old, new = fake_lora(tmp_path / "old", "old weights"), fake_lora(tmp_path / "new", "new weights")
    store = tmp_path / "store"
    worker = start(*SLOTS, "--host-cache", "ratio=2", "--storage", f"file://{store}?size_gb=0.1")
    async with grpc.aio.insecure_channel(worker.address) as channel:
        stub: Any = worker_pb2_grpc.WorkerStub(channel)
        first = await stub.LoadLora(load("x", old))
        for turn in range(2):
            assert (await collect(stub, ask(f"a{turn}", "x")))[0] == expected(fake_digest(old))
        second = await stub.LoadLora(load("x", new))
        assert first.lora.state.digest != second.lora.state.digest
        assert first.lora.state.version < second.lora.state.version
        tokens, last = await collect(stub, ask("b", "x"))
        assert tokens == expected(fake_digest(new)) and last.usage.cached_tokens == 0
        # The same bytes again meet their own pages, in whatever tier these are.
        await stub.ClearCache(worker_pb2.ClearCacheRequest(tiers=[worker_pb2.CACHE_TIER_DEVICE]))
        shutil.rmtree(new)
        shutil.copytree(old, new)
        await stub.LoadLora(load("x"))
        tokens, last = await collect(stub, ask("c", "x"))
        assert tokens == expected(fake_digest(old)) and last.usage.cached_tokens > 0
        await stub.ClearCache(worker_pb2.ClearCacheRequest(tiers=[worker_pb2.CACHE_TIER_DEVICE]))
        fake_lora(new, "third weights")
        await stub.LoadLora(load("x"))
        tokens, last = await collect(stub, ask("d", "x"))
        assert tokens == expected(fake_digest(new)) and last.usage.cached_tokens == 0


async def test_kv_events_and_watched_loads_name_adapters(start, tmp_path: Path) -> None:
    path = fake_lora(tmp_path / "x", "weights")
    worker = start(*SLOTS)
    async with grpc.aio.insecure_channel(worker.address) as channel:
        stub: Any = worker_pb2_grpc.WorkerStub(channel)
        watch = stub.WatchLoad(worker_pb2.WatchLoadRequest(interval_ms=10))
        first = await watch.read()
        assert first.HasField("loras") and (first.loras.slots, first.loras.free_slots) == (2, 2)
        await stub.LoadLora(load("x", path))
        async with asyncio.timeout(30):
            while not (await watch.read()).loras.loras:
                pass
        await collect(stub, ask("1", "x"))
        events = stub.SubscribeKvEvents(worker_pb2.SubscribeKvEventsRequest())
        stored = (await events.read()).events[1].block_stored
        assert (stored.lora_name, stored.lora_digest) == ("x", fake_digest(path))
        namespace = cache_namespace("", fake_digest(path).hex())
        assert stored.block_hashes[0] == hash_pages(PROMPT, 16, salt=namespace)[0]


async def test_wrong_adapters_are_refused_by_name_and_change_nothing(start, tmp_path: Path) -> None:
    good, large = fake_lora(tmp_path / "good", "weights"), fake_lora(tmp_path / "large", "weights", rank=32)
    heavy = fake_lora(tmp_path / "heavy", "w" * 3_000_000)
    worker = start("--lora-slots", "2,rank=16,host_gb=0.001")
    async with grpc.aio.insecure_channel(worker.address) as channel:
        stub: Any = worker_pb2_grpc.WorkerStub(channel)
        await stub.LoadLora(load("x", good))
        code, said = await refusal(stub.LoadLora(load("x", large)))
        assert code == grpc.StatusCode.INVALID_ARGUMENT and "rank 32" in said
        code, said = await refusal(stub.LoadLora(load("x", heavy)))
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED and "3000000 bytes" in said
        code, said = await refusal(stub.LoadLora(load("x", tmp_path / "nothing")))
        assert code == grpc.StatusCode.INVALID_ARGUMENT and "adapter_config.json" in said
        (tmp_path / "empty").mkdir()
        assert "holds no adapter_config.json" in (await refusal(stub.LoadLora(load("y", tmp_path / "empty"))))[1]
        for name in ("", "a:b", "fake", "x" * 129, " x", "a\nb"):
            assert (await refusal(stub.LoadLora(load(name, good))))[0] == grpc.StatusCode.INVALID_ARGUMENT
        assert (await collect(stub, ask("1", "x")))[0] == expected(fake_digest(good))
        assert [*await listed(stub)] == ["x"]


async def test_adapters_nobody_uses_leave_memory_for_others_and_come_back(start, tmp_path: Path) -> None:
    # 8000 bytes each in memory; room for three.
    paths = {f"a{n}": fake_lora(tmp_path / f"a{n}", f"weights {n}") for n in range(8)}
    worker = start(
        "--lora", *(f"{name}={path}" for name, path in paths.items()), "--lora-slots", f"2,host_gb={25_000 / 2**30}"
    )
    async with grpc.aio.insecure_channel(worker.address) as channel:
        stub: Any = worker_pb2_grpc.WorkerStub(channel)
        for turn in range(3):
            for name, path in paths.items():
                assert (await collect(stub, ask(f"{turn}{name}", name)))[0] == expected(fake_digest(path))
                report = await stub.ListLoras(worker_pb2.ListLorasRequest())
                assert report.host_bytes <= report.host_budget + 8000  # one that is being dropped may still be counted
        await bytes_become(stub, 24_000)


async def test_a_router_s_source_is_loaded_if_newer_and_never_an_older_or_unloaded_one(start, tmp_path: Path) -> None:
    old, new = fake_lora(tmp_path / "old", "old weights"), fake_lora(tmp_path / "new", "new weights")
    worker = start(*SLOTS)
    async with grpc.aio.insecure_channel(worker.address) as channel:
        stub: Any = worker_pb2_grpc.WorkerStub(channel)

        def source(path: Path, version: int, digest: bytes = b"") -> worker_pb2.LoraSource:
            return worker_pb2.LoraSource(path=str(path), version=version, digest=digest)

        assert (await collect(stub, ask("1", "x", lora_source=source(old, 10))))[0] == expected(fake_digest(old))
        assert (await collect(stub, ask("2", "x", lora_source=source(new, 11))))[0] == expected(fake_digest(new))
        assert (await collect(stub, ask("3", "x", lora_source=source(old, 10))))[0] == expected(fake_digest(new))
        code, _ = await refusal(collect(stub, ask("4", "x", lora_source=source(new, 11, fake_digest(old)))))
        assert code == grpc.StatusCode.UNAVAILABLE
        kept = await stub.LoadLora(load("x", old, version=10))
        assert kept.lora.state.version == 11
        await stub.UnloadLora(worker_pb2.UnloadLoraRequest(name="x"))
        assert (await refusal(collect(stub, ask("5", "x", lora_source=source(new, 11)))))[
            0
        ] == grpc.StatusCode.NOT_FOUND
        assert (await refusal(stub.LoadLora(load("x", new, version=11))))[0] == grpc.StatusCode.NOT_FOUND
        later = source(old, time.time_ns() + 10**12)
        assert (await collect(stub, ask("6", "x", lora_source=later)))[0] == expected(fake_digest(old))


async def test_a_resolver_finds_adapters_when_requests_name_them(start, tmp_path: Path) -> None:
    folder = tmp_path / "adapters"
    path = fake_lora(folder / "x", "weights")
    worker = start("--lora-slots", f"2,resolver=folder:{folder}")
    async with grpc.aio.insecure_channel(worker.address) as channel:
        stub: Any = worker_pb2_grpc.WorkerStub(channel)
        assert (await stub.GetModelInfo(worker_pb2.GetModelInfoRequest())).resolves_loras
        answers = await asyncio.gather(*(collect(stub, ask(f"r{n}", "x")) for n in range(8)))
        assert all(tokens == expected(fake_digest(path)) for tokens, _ in answers)
        for name in ("y", "../x", "..", "x/", str(path)):
            code, _ = await refusal(collect(stub, ask(f"n{name[:3]}".replace(" ", ""), name)))
            assert code in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT)
        for number, name in enumerate(("a\nb", "z" * 200, "a:b")):
            code, _ = await refusal(collect(stub, ask(f"odd{number}", name)))
            assert code == grpc.StatusCode.NOT_FOUND
        (fake_lora(folder / "broken", "weights") / "adapter_model.safetensors").unlink()
        code, said = await refusal(collect(stub, ask("broken", "broken")))
        assert code == grpc.StatusCode.NOT_FOUND and "cannot be loaded" in said and str(folder) not in said


async def test_embeddings_are_made_by_the_adapter_that_is_named(start, tmp_path: Path) -> None:
    path = fake_lora(tmp_path / "x", "weights")
    worker = start(*SLOTS, "--embedding-size", "1", "--lora", f"x={path}")
    async with grpc.aio.insecure_channel(worker.address) as channel:
        stub: Any = worker_pb2_grpc.WorkerStub(channel)

        async def embed(lora: str) -> float:
            inputs = [common_pb2.TokenIds(ids=PROMPT)]
            message = worker_pb2.WorkerEmbedRequest(
                inputs=inputs, pooling=worker_pb2.POOLING_LAST, normalize=False, lora_name=lora
            )
            return float((await stub.Embed(message)).embeddings[0].values[0])

        assert await embed("") == pooled_prompt(PROMPT, "last")
        changed = await embed("x")
        assert changed != await embed("")
        assert await embed("x") == changed
        assert (await refusal(embed("y")))[0] == grpc.StatusCode.NOT_FOUND


async def test_adapters_are_there_again_after_the_scheduler_was_killed(start, tmp_path: Path) -> None:
    x, y = fake_lora(tmp_path / "x", "weights x"), fake_lora(tmp_path / "y", "weights y")
    worker = start(*SLOTS, "--lora", f"y={y},pinned")
    async with grpc.aio.insecure_channel(worker.address) as channel:
        stub: Any = worker_pb2_grpc.WorkerStub(channel)
        await stub.LoadLora(load("x", x))
        assert (await collect(stub, ask("1", "x")))[0] == expected(fake_digest(x))
        os.kill(worker.scheduler_pid(), signal.SIGKILL)
        async with asyncio.timeout(60):
            while True:
                try:
                    tokens, _ = await collect(stub, ask("2", "x"))
                    break
                except grpc.aio.AioRpcError as error:
                    assert error.code() == grpc.StatusCode.UNAVAILABLE
                    await asyncio.sleep(0.05)
        assert tokens == expected(fake_digest(x))
        assert (await listed(stub))["y"].state.place == worker_pb2.LORA_PLACE_HOST


@pytest.mark.slow
async def test_a_thousand_loads_under_load_give_no_wrong_token_and_leak_nothing(start, tmp_path: Path) -> None:
    worker = start("--lora-slots", "2,host_gb=0.0001", step_ms=0)
    chance = random.Random(1)
    async with grpc.aio.insecure_channel(worker.address) as channel:
        stub: Any = worker_pb2_grpc.WorkerStub(channel)
        folders = [fake_lora(tmp_path / f"v{n}", f"weights {n}") for n in range(6)]
        digests = [fake_digest(each) for each in folders]
        done = refused = 0

        async def client(number: int) -> None:
            nonlocal done, refused
            while not over:
                name, prompt = (
                    f"n{chance.randrange(4)}",
                    [chance.randrange(900) for _ in range(chance.randint(1, 40))],
                )
                try:
                    tokens, _ = await collect(stub, ask(f"c{number}-{done}-{refused}", name, 12, prompt))
                except grpc.aio.AioRpcError as error:
                    assert error.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.CANCELLED), error
                    refused += 1
                    await asyncio.sleep(0.001)
                    continue
                assert tokens in [expected(digest, 12, prompt) for digest in digests]
                done += 1

        over = False
        clients = [asyncio.ensure_future(client(number)) for number in range(6)]
        for turn in range(1000):
            name = f"n{turn % 4}"
            await stub.LoadLora(load(name, chance.choice(folders)))
            if chance.random() < 0.3:
                abort = chance.random() < 0.5
                await stub.UnloadLora(worker_pb2.UnloadLoraRequest(name=name, abort_requests=abort))
        over = True
        await asyncio.gather(*clients)
        assert done > 100 and refused > 0
        for name in [*await listed(stub)]:
            await stub.UnloadLora(worker_pb2.UnloadLoraRequest(name=name))
        await bytes_become(stub, 0)


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGKILL])
async def test_a_worker_that_is_stopped_while_it_loads_from_slow_storage_ends_at_once(
    start, tmp_path: Path, signal_number: int
) -> None:
    path = fake_lora(tmp_path / "x", "weights")
    (path / "adapter_model.safetensors").unlink()
    os.mkfifo(path / "adapter_model.safetensors")  # a reader of it waits for ever
    worker = start(*SLOTS)
    async with grpc.aio.insecure_channel(worker.address) as channel:
        stub: Any = worker_pb2_grpc.WorkerStub(channel)
        loading = stub.LoadLora(load("x", path))
        waiting = asyncio.ensure_future(collect(stub, ask("1")))
        assert (await waiting)[0] == expected(), "others go on meanwhile"
        began = time.monotonic()
        os.kill(worker.process.pid, signal_number)
        assert worker.wait() is not None
        assert time.monotonic() - began < 20
        loading.cancel()


async def test_a_folder_that_vanishes_changes_nothing_for_those_who_have_it(start, tmp_path: Path) -> None:
    path = fake_lora(tmp_path / "x", "weights")
    digest = fake_digest(path)
    worker = start(*SLOTS)
    async with grpc.aio.insecure_channel(worker.address) as channel:
        stub: Any = worker_pb2_grpc.WorkerStub(channel)
        before = (await stub.LoadLora(load("x", path))).lora.state
        shutil.rmtree(path)
        assert (await collect(stub, ask("1", "x")))[0] == expected(digest)
        assert (await refusal(stub.LoadLora(load("x"))))[0] == grpc.StatusCode.INVALID_ARGUMENT
        assert (await collect(stub, ask("2", "x")))[0] == expected(digest)
        after = (await listed(stub))["x"].state
        assert (after.version, after.digest) == (before.version, digest)
        await stub.UnloadLora(worker_pb2.UnloadLoraRequest(name="x"))
        assert (await refusal(stub.LoadLora(load("x"))))[0] == grpc.StatusCode.INVALID_ARGUMENT
        assert (await refusal(collect(stub, ask("3", "x"))))[0] == grpc.StatusCode.NOT_FOUND
