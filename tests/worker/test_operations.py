"""What operators do to a worker, and what it does when its scheduler dies or hangs: real processes, no model."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from itertools import islice
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sapwood.cli.errors import REFUSED
from sapwood.cli.main import main
from sapwood.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from sapwood_common.contract.sampling import SamplingParams
from sapwood_testing.worker.asking import collect, load_where, rest_of
from sapwood_testing.worker.fake_runner import continuation

VOCAB = 1000
SEED = 11
STALL = 998
PRIORITY = ("--policy", "priority", "--max-running", "1", "--embedding-size", "1")
SERVING = health_pb2.HealthCheckResponse.SERVING


def request(name: str, prompt: list[int], max_tokens: int = 5, **fields: object) -> worker_pb2.WorkerGenerateRequest:
    sampling = common_pb2.SamplingParams(seed=SEED, max_tokens=max_tokens)
    return worker_pb2.WorkerGenerateRequest(request_id=name, token_ids=prompt, sampling=sampling, **fields)  # type: ignore[arg-type]


def expected(prompt: list[int], count: int) -> list[int]:
    return list(islice(continuation(prompt, SamplingParams(seed=SEED), VOCAB), count))


async def health_is(channel, status: int) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    async with asyncio.timeout(60):
        while (await stub.Check(health_pb2.HealthCheckRequest(service="sapwood.v1.Worker"))).status != status:
            await asyncio.sleep(0.02)


async def when_serving(stub, message) -> tuple[list[int], worker_pb2.WorkerGenerateResponse]:
    """Repeats a request until the worker takes it; nothing but UNAVAILABLE may come before."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await collect(stub, message)
            except grpc.aio.AioRpcError as error:
                assert error.code() == grpc.StatusCode.UNAVAILABLE
                await asyncio.sleep(0.05)


async def test_a_killed_scheduler_ends_requests_unavailable_and_is_started_again(start) -> None:
    worker = start(step_ms=20)  # nobody is done before all have begun
    async with grpc.aio.insecure_channel(worker.address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        before = await stub.GetModelInfo(worker_pb2.GetModelInfoRequest())
        assert (await collect(stub, request("warm", [9] * 40)))[0] == expected([9] * 40, 5)
        events = stub.SubscribeKvEvents(worker_pb2.SubscribeKvEventsRequest())
        snapshot = await events.read()
        assert len(snapshot.events) == 2
        calls = [stub.Generate(request(f"r{n}", [n], max_tokens=1000)) for n in range(4)]
        for call in calls:
            await call.read()
        os.kill(worker.scheduler_pid(), signal.SIGKILL)
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await rest_of(call)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        tokens, last = await when_serving(stub, request("again", [9] * 40))
        assert tokens == expected([9] * 40, 5)
        assert last.usage.cached_tokens == 0, "what the old one had cached is gone"
        after = await stub.GetModelInfo(worker_pb2.GetModelInfoRequest())
        assert after.epoch > before.epoch
        await health_is(channel, SERVING)
        while True:
            batch = await events.read()
            if batch.epoch == after.epoch:
                break
        assert batch.events[0].HasField("all_blocks_cleared")


@pytest.mark.slow
async def test_a_scheduler_that_dies_again_and_again_is_waited_for_and_the_worker_stays(start) -> None:
    worker = start()
    async with grpc.aio.insecure_channel(worker.address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        for number in range(3):
            await when_serving(stub, request(f"r{number}", [1]))
            os.kill(worker.scheduler_pid(), signal.SIGKILL)
            with pytest.raises(grpc.aio.AioRpcError):
                while True:  # until the loss is noticed
                    await collect(stub, request(f"r{number}", [1], max_tokens=100))
        tokens, _ = await when_serving(stub, request("again", [1]))
        assert tokens == expected([1], 5)
        await health_is(channel, SERVING)
    worker.process.send_signal(signal.SIGTERM)
    assert worker.wait() == 0
    pauses = re.findall(r"it has ended (\d) times in a row: it starts again in (\d+) s", worker.log)
    assert pauses == [("3", "2")], "the first two are not waited for"


@pytest.mark.slow
async def test_sigterm_while_the_scheduler_starts_again_ends_the_worker(start) -> None:
    worker = start("--load-seconds", "5")  # time enough to see it load
    async with grpc.aio.insecure_channel(worker.address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        os.kill(worker.scheduler_pid(), signal.SIGKILL)
        await health_is(channel, health_pb2.HealthCheckResponse.NOT_SERVING)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetModelInfo(worker_pb2.GetModelInfoRequest())
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        worker.process.send_signal(signal.SIGTERM)
    assert worker.wait() == 0


@pytest.mark.parametrize("retract", [False, True])
async def test_a_pause_computes_nothing_and_loses_nothing(lend, retract: bool) -> None:
    async with grpc.aio.insecure_channel(lend(step_ms=10).address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        call = stub.Generate(request("r", [7] * 40, max_tokens=300))  # three seconds, in which the pause comes
        tokens = list((await call.read()).token_ids)
        await stub.Pause(worker_pb2.PauseRequest(retract=retract))
        later = stub.Generate(request("later", [8], max_tokens=3))
        load = await load_where(stub, lambda load: load.waiting_requests == 1 + retract)
        if retract:
            freed = await stub.FlushCache(worker_pb2.FlushCacheRequest())
            assert freed.freed_pages == load.used_pages > 0
        await stub.Resume(worker_pb2.ResumeRequest())
        tokens += await rest_of(call)
        assert tokens == expected([7] * 40, 300)
        assert [token async for response in later for token in response.token_ids] == expected([8], 3)


async def test_a_drained_worker_finishes_what_runs_and_refuses_what_is_new(start) -> None:
    async with grpc.aio.insecure_channel(start(step_ms=10).address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        call = stub.Generate(
            request("r", [7], max_tokens=400)
        )  # four seconds, in which the worker is asked and refuses
        tokens = list((await call.read()).token_ids)
        drain = asyncio.ensure_future(stub.Drain(worker_pb2.DrainRequest()))
        await health_is(channel, health_pb2.HealthCheckResponse.NOT_SERVING)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stub, request("late", [1]))
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert not drain.done()
        tokens += await rest_of(call)
        assert tokens == expected([7], 400)
        await asyncio.wait_for(drain, 60)


async def test_a_pinned_prefix_survives_a_flush(lend) -> None:
    async with grpc.aio.insecure_channel(lend().address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        prefix = list(range(40))
        await collect(stub, request("warm", prefix))
        pinned = await stub.PinPrefix(worker_pb2.PinPrefixRequest(name="system", token_ids=prefix))
        assert pinned.pinned_tokens == 32
        await stub.FlushCache(worker_pb2.FlushCacheRequest())
        _, last = await collect(stub, request("again", prefix))
        assert last.usage.cached_tokens == 32
        assert (await stub.UnpinPrefix(worker_pb2.UnpinPrefixRequest(name="system"))).found
        assert not (await stub.UnpinPrefix(worker_pb2.UnpinPrefixRequest(name="system"))).found
        await stub.FlushCache(worker_pb2.FlushCacheRequest())
        _, last = await collect(stub, request("cold", prefix))
        assert last.usage.cached_tokens == 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.PinPrefix(worker_pb2.PinPrefixRequest(token_ids=prefix))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_salts_share_nothing_and_unknown_loras_and_long_names_are_refused(lend) -> None:
    async with grpc.aio.insecure_channel(lend().address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        cached = []
        for number, salt in enumerate(["", "mine", "", "mine", "yours"]):
            _, last = await collect(stub, request(f"r{number}", [3] * 40, cache_salt=salt))
            cached.append(last.usage.cached_tokens)
        assert cached == [0, 0, 39, 39, 0]
        for fields, code in (
            ({"lora_name": "poet"}, grpc.StatusCode.NOT_FOUND),
            ({"tenant": "t" * 129}, grpc.StatusCode.INVALID_ARGUMENT),
            ({"cache_salt": "s" * 257}, grpc.StatusCode.INVALID_ARGUMENT),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await collect(stub, request("bad", [1], **fields))
            assert caught.value.code() == code


async def test_embeddings_take_their_turn_by_priority_and_tenant(lend) -> None:
    worker = lend(*PRIORITY, step_ms=2)
    order: list[str] = []
    async with grpc.aio.insecure_channel(worker.address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)

        async def run(name: str, **terms: int | str) -> None:
            inputs = [common_pb2.TokenIds(ids=[len(order), len(name), *name.encode()])]
            await stub.Embed(worker_pb2.WorkerEmbedRequest(request_id=name, inputs=inputs, **terms))  # type: ignore[arg-type]
            order.append(name)

        await stub.Pause(worker_pb2.PauseRequest())
        asked = []
        for count, (name, terms) in enumerate(
            [
                ("greedy 1", {"tenant": "greedy"}),
                ("greedy 2", {"tenant": "greedy"}),
                ("greedy 3", {"tenant": "greedy"}),
                ("modest", {"tenant": "modest"}),
                ("urgent", {"tenant": "greedy", "priority": 1}),
            ],
            1,
        ):
            asked.append(asyncio.create_task(run(name, **terms)))
            await load_where(stub, lambda load: load.waiting_requests == count)  # noqa: B023
        await stub.Resume(worker_pb2.ResumeRequest())
        await asyncio.gather(*asked)
    assert order[0] == "urgent"
    assert order.index("modest") < order.index("greedy 3")


async def test_a_higher_priority_overtakes(lend) -> None:
    worker = lend(*PRIORITY, step_ms=2)
    async with grpc.aio.insecure_channel(worker.address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        ended: list[str] = []

        async def run(name: str, max_tokens: int, priority: int) -> None:
            tokens, _ = await collect(stub, request(name, [len(name)], max_tokens=max_tokens, priority=priority))
            assert tokens == expected([len(name)], max_tokens)
            ended.append(name)

        low = asyncio.ensure_future(run("low", 2000, -1))
        await load_where(stub, lambda load: load.running_requests == 1)
        await run("high", 5, 1)
        assert ended == ["high"], "the low one gave way"
        await low


async def test_a_profile_is_a_chrome_trace(lend, tmp_path: Path) -> None:
    async with grpc.aio.insecure_channel(lend().address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.StopProfile(worker_pb2.StopProfileRequest())
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        folder = str(tmp_path / "profile")
        started = await stub.StartProfile(worker_pb2.StartProfileRequest(folder=folder))
        assert started.folder == folder
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.StartProfile(worker_pb2.StartProfileRequest())
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        await collect(stub, request("r", [1, 2, 3]))
        path = (await stub.StopProfile(worker_pb2.StopProfileRequest())).path
    assert_is_trace(Path(path), Path(folder))


def assert_is_trace(path: Path, folder: Path) -> None:
    assert path.parent == folder
    assert "traceEvents" in json.loads(path.read_text())


async def test_a_stuck_step_is_dumped_and_turns_the_worker_unhealthy_until_it_ends(start) -> None:
    for seconds in ("2.5", "25"):  # where the machine is slow, the first may be over before anybody has looked
        worker = start("--watchdog-timeout", "0.5", "--stall-token", str(STALL), "--stall-seconds", seconds)
        async with grpc.aio.insecure_channel(worker.address) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            stalled = asyncio.ensure_future(collect(stub, request("stalls", [STALL])))
            unhealthy = asyncio.ensure_future(health_is(channel, health_pb2.HealthCheckResponse.NOT_SERVING))
            await asyncio.wait({stalled, unhealthy}, return_when=asyncio.FIRST_COMPLETED)
            seen = unhealthy.done() and not stalled.done()
            unhealthy.cancel()
            assert (await stalled)[0] == expected([STALL], 5)
            await health_is(channel, SERVING)
        if seen:
            break
    assert seen
    worker.process.send_signal(signal.SIGTERM)
    worker.wait()
    assert "the worker is stuck" in worker.log
    assert "Timeout (0:00:00.5" in worker.log and "fake_model.py" in worker.log, "the stacks were dumped"


async def test_a_step_that_does_not_end_ends_with_its_process(start) -> None:
    flags = ("--watchdog-timeout", "0.5", "--watchdog-restart", "2", "--stall-token", str(STALL))
    worker = start(*flags, "--stall-seconds", "3600")
    async with grpc.aio.insecure_channel(worker.address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        session = stub.Session()
        await session.write(worker_pb2.SessionRequest(heartbeat_ms=10))
        assert not (await session.read()).draining
        stalled = asyncio.ensure_future(collect(stub, request("stalls", [STALL])))
        while not (await session.read()).draining:  # a router gives it nothing new
            pass
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stalled
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        await health_is(channel, SERVING)
        assert (await when_serving(stub, request("next", [1, 2])))[0] == expected([1, 2], 5)


async def test_a_long_prefill_of_many_steps_is_not_stuck(start) -> None:
    # 57 steps take longer than the limit, each a fraction of it; unless the machine stands still: then a longer limit shows it.
    for limit, step_ms in ((1.4, 30), (5, 100), (20, 400)):
        limits = ("--watchdog-timeout", str(limit), "--watchdog-restart", "100")
        worker = start(*limits, "--max-step-tokens", "64", step_ms=step_ms)
        async with grpc.aio.insecure_channel(worker.address) as channel:
            stub, health = worker_pb2_grpc.WorkerStub(channel), health_pb2_grpc.HealthStub(channel)
            long = asyncio.ensure_future(collect(stub, request("long", list(range(900)) * 4)))
            seen = set()
            while not long.done():
                seen.add((await health.Check(health_pb2.HealthCheckRequest())).status)
                await asyncio.sleep(0.02)
            assert (await long)[0] == expected(list(range(900)) * 4, 5)
        if seen == {SERVING}:
            break
    assert seen == {SERVING}


async def test_the_command_line_operates_a_worker(start, capsys) -> None:
    worker = start("--max-running", "1")

    async def operate(*words: str) -> dict[str, object]:
        code = await asyncio.to_thread(main, ["worker", *words, "--worker", worker.address, "--json"])
        assert code == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer.pop("worker") == worker.address
        return answer

    async with grpc.aio.insecure_channel(worker.address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        info = await operate("info")
        assert (info["max_running"], info["prefill_attention"]) == (1, "")  # a stand-in for a model has no attention
        assert await asyncio.to_thread(main, ["worker", "info", "--worker", worker.address]) == 0
        first, *facts = capsys.readouterr().out.splitlines()
        assert first == f"{worker.address}:" and {"  max_running 1", "  speculate off"} <= set(facts)
        assert await operate("pause", "--retract") == {"state": "paused"}
        call = stub.Generate(request("r", [7] * 40, max_tokens=3))
        while (await operate("load"))["waiting_requests"] != 1:
            pass
        assert await operate("abort", "unknown") == {"found": False}
        assert await operate("resume") == {"state": "resumed"}
        assert await rest_of(call) == expected([7] * 40, 3)
        assert await operate("pin", "p", "--token-ids", ",".join(["7"] * 40)) == {"pinned_tokens": 32}
        assert await operate("flush") == {"freed_pages": 1}, "the page that is not full"
        assert await operate("unpin", "p") == {"found": True}
        assert await operate("flush") == {"freed_pages": 2}
        assert await operate("role", "both") == {"state": "role both"}
        assert (await operate("info"))["role"] == "both"
        asked = ["worker", "role", "prefill", "--worker", worker.address]
        assert await asyncio.to_thread(main, asked) == REFUSED
        assert "this worker's KV cache has no second tier" in capsys.readouterr().err
        assert await asyncio.to_thread(main, ["worker", "profile", "stop", "--worker", worker.address]) == REFUSED
        assert "no profile is being recorded" in capsys.readouterr().err
        assert await operate("drain") == {"state": "drained"}
        await health_is(channel, health_pb2.HealthCheckResponse.NOT_SERVING)
