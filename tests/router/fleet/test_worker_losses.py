"""Real worker processes (around a runner without a model) killed and stopped under load: nobody notices but by a pause."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from sapwood.v1 import router_pb2, router_pb2_grpc
from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.network.channel import open_channel
from sapwood_router.app import RouterApplication
from sapwood_router.config import RouterConfig
from sapwood_router.fleet.worker import Worker
from sapwood_testing.router.fake_tokenizer import FakeTokenizer
from sapwood_testing.router.worker_process import VOCAB, Load, WorkerProcess
from sapwood_testing.worker.fake_runner import continuation


@contextlib.asynccontextmanager
async def cluster(
    workers: int,
    namespaces: Sequence[Any] = (),
    workers_file: Path | None = None,
    flags: Sequence[str] = (),
    **settings,
):
    tokenizer = FakeTokenizer()
    await tokenizer.start()
    processes = [WorkerProcess(each, flags) for each in namespaces or [None] * workers]
    await asyncio.gather(*(process.start() for process in processes))
    addresses = tuple(process.address for process in processes)
    if workers_file is not None:
        await asyncio.to_thread(workers_file.write_text, "\n".join(addresses))
    # A worker that gets little of a core is silent for seconds: only where silence is the loss it counts, and then not so soon.
    settings = {"worker_silence": 60, "resume_grace": 60, "tokenizer_grace": 60, "queue_wait": 120, **settings}
    router = RouterApplication(
        RouterConfig(
            port=0,
            http_port=0,
            tokenizer=tokenizer.address,
            workers=addresses if workers_file is None else (),
            workers_file=workers_file,
            **settings,
        )
    )
    await router.start()
    channel = open_channel(f"127.0.0.1:{router.grpc_port}")
    try:
        await available(router, workers)
        yield router, processes, router_pb2_grpc.RouterStub(channel)
    finally:
        await channel.close()
        await router.stop()
        for process in processes:
            await process.kill()
        await tokenizer.kill()


PATIENCE = 300.0
"""Seconds after which what has not come never does. How long it takes is the machine's affair: next to a compiler, a
minute."""


async def available(router: RouterApplication, count: int) -> None:
    async with asyncio.timeout(PATIENCE):
        while len(router.registry.available("fake")) != count:
            await asyncio.sleep(0.01)


async def moved(router: RouterApplication, worker: WorkerProcess) -> None:
    """Waits until what ran on a worker runs elsewhere."""
    async with asyncio.timeout(PATIENCE):
        while known_as(router, worker).in_flight:
            await asyncio.sleep(0.01)


def known_as(router: RouterApplication, worker: WorkerProcess) -> Worker:
    return next(known for known in router.registry.all() if known.address == worker.address)


def losses_of(router: RouterApplication, worker: WorkerProcess) -> float:
    return (
        router._metrics.registry.get_sample_value("sapwood_router_worker_losses_total", {"worker": worker.address}) or 0
    )


async def progress(load: Load, requests: int) -> None:
    goal = load.done + requests
    async with asyncio.timeout(PATIENCE):
        while load.done < goal:
            load.check()
            await asyncio.sleep(0.01)


async def kill_and_restart(router: RouterApplication, worker: WorkerProcess, workers: int, load: Load) -> None:
    await worker.kill()
    await available(router, workers - 1)
    await progress(load, 4)
    await worker.start()
    await available(router, workers)


async def stop_and_continue(router: RouterApplication, worker: WorkerProcess, workers: int, load: Load) -> None:
    worker.send(signal.SIGSTOP)
    await available(router, workers - 1)
    await progress(load, 4)
    worker.send(signal.SIGCONT)
    await available(router, workers)


async def freeze_and_thaw(router: RouterApplication, worker: WorkerProcess, workers: int, load: Load) -> None:
    worker.send_to_scheduler(signal.SIGSTOP)
    await available(router, workers - 1)
    await moved(router, worker)
    await progress(load, 4)
    worker.send_to_scheduler(signal.SIGCONT)
    await available(router, workers)


async def part_and_mend(router: RouterApplication, worker: WorkerProcess, workers: int, load: Load) -> None:
    assert worker.namespace is not None
    worker.namespace.part()
    await available(router, workers - 1)
    await progress(load, 4)
    worker.namespace.mend()
    await available(router, workers)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("lose", "rounds"),
    [
        (kill_and_restart, 2),
        pytest.param(stop_and_continue, 1, marks=pytest.mark.slow),
        (freeze_and_thaw, 1),
        pytest.param(kill_and_restart, 20, marks=pytest.mark.slow),
        pytest.param(stop_and_continue, 20, marks=pytest.mark.slow),
        pytest.param(freeze_and_thaw, 20, marks=pytest.mark.slow),
        pytest.param(part_and_mend, 20, marks=pytest.mark.slow),
    ],
)
async def test_no_request_fails_and_every_stream_is_as_if_undisturbed(lose, rounds, make_namespace) -> None:
    count = 3 if rounds < 20 else 4
    namespaces = [make_namespace() for _ in range(count)] if lose is part_and_mend else []
    # Of the many seconds' silences some may be the machine's: those cost resumptions, too.
    settings = {} if lose is kill_and_restart else {"worker_silence": 2, "most_resumptions": 20}
    async with cluster(count, namespaces, **settings) as (router, workers, stub):
        load = Load(stub, streams=16, seed=rounds)
        rng = random.Random(rounds)
        losses = 0
        while losses < rounds or load.resumed < rounds:  # a worker may have said all before the router reads it
            assert losses < 10 * rounds
            await progress(load, 8)
            await lose(router, rng.choice(workers), len(workers), load)
            losses += 1
        await progress(load, 8)
        await load.stop()
        assert all(worker.in_flight == 0 and worker.pending_tokens == 0 for worker in router.registry.all())


async def test_a_path_that_swallows_large_packets_loses_its_worker_despite_heartbeats(make_namespace) -> None:
    """Silence would be noticed after a minute: what is sent to the worker is what does not arrive."""
    chance = random.Random(1)
    prompts = [[chance.randrange(3, VOCAB) for _ in range(400)] for _ in range(50)]
    async with cluster(2, [make_namespace() for _ in range(2)], most_resumptions=20) as (router, workers, stub):
        load = Load(stub, 4, 1, prompts)
        await progress(load, 4)
        holed = workers[0]
        holed.namespace.swallow()
        await available(router, 1)
        problem = known_as(router, holed).problem or ""
        assert "what is sent there has not arrived" in problem
        await progress(load, 12)
        assert not known_as(router, holed).available, "small packets pass, and that is no reason to choose it"
        holed.namespace.spit()
        await available(router, 2)
        await progress(load, 8)
        await load.stop()


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_drafted_streams_continue_unchanged_when_their_worker_is_killed() -> None:
    prompts = [[3 + number] * (5 + number) for number in range(12)]
    async with cluster(3, flags=("--speculate", "prefix")) as (router, workers, stub):
        load = Load(stub, streams=12, seed=1, prompts=prompts)
        rng = random.Random(1)
        await progress(load, 36)
        losses = 0
        while losses < 3 or load.resumed < 3:
            assert losses < 30
            await kill_and_restart(router, rng.choice(workers), len(workers), load)
            await progress(load, 24)
            losses += 1
        await load.stop()
        assert load.accepted > 100


@pytest.mark.slow
async def test_restarting_all_workers_one_after_the_other_fails_no_request() -> None:
    async with cluster(2) as (router, workers, stub):
        load = Load(stub, streams=8, seed=1)
        for worker in workers:
            await progress(load, 4)
            worker.send(signal.SIGTERM)
            await available(router, 1)
            await worker.process.wait()
            assert worker.process.returncode == 0
            await worker.start()
            await available(router, 2)
        await load.stop()
        assert load.resumed == 0


@pytest.mark.slow
async def test_unnamed_workers_finish_and_removed_workers_hand_on_at_no_cost(
    tmp_path,
) -> None:
    file = tmp_path / "workers"
    async with cluster(2, workers_file=file, most_resumptions=0) as (router, workers, stub):
        load = Load(stub, streams=8, seed=1)
        for worker in workers:
            await progress(load, 4)
            file.write_text("\n".join(other.address for other in workers if other is not worker))
            async with asyncio.timeout(60):
                while len(router.registry.all()) == 2:
                    await asyncio.sleep(0.01)
            await progress(load, 4)
            file.write_text("\n".join(other.address for other in workers))
            await available(router, 2)
        await load.stop()
        assert load.resumed == 0
        request = router_pb2.RouterGenerateRequest()
        request.tokens.ids.extend([5, 6, 7])
        request.sampling.seed, request.sampling.max_tokens = 7, 200
        moves = attempts = 0
        while moves < 4:  # a worker may have said all before this process has moved it often enough
            attempts += 1
            assert attempts <= 10
            call = stub.Generate(request, timeout=120)
            tokens: list[int] = []
            moves = 0
            while (response := await call.read()) is not grpc.aio.EOF:
                tokens += response.token_ids
                busy = next((worker for worker in router.registry.all() if worker.in_flight), None)
                if moves < 4 and busy is not None:
                    await stub.RemoveWorker(router_pb2.RemoveWorkerRequest(address=busy.address))
                    await stub.RegisterWorker(router_pb2.RegisterWorkerRequest(address=busy.address))
                    moves += 1
                    await available(router, 2)
            assert tokens == list(islice(continuation([5, 6, 7], SamplingParams(seed=7), VOCAB), 200))
            moves = int(dict(await call.trailing_metadata())["x-sapwood-resumptions"])
            assert moves <= 4


async def test_the_scheduler_of_a_worker_dies() -> None:
    async with cluster(2) as (router, workers, stub):
        load = Load(stub, streams=8, seed=1)
        await progress(load, 4)
        workers[0].send_to_scheduler(signal.SIGKILL)
        await available(router, 1)
        await progress(load, 8)
        await load.stop()


async def test_a_frozen_idle_worker_keeps_no_new_request_waiting() -> None:
    async with cluster(2, worker_silence=1, policy="round_robin") as (router, workers, stub):
        workers[0].send_to_scheduler(signal.SIGSTOP)
        load = Load(stub, streams=8, seed=1)
        async with asyncio.timeout(60):
            while not known_as(router, workers[0]).in_flight:
                await asyncio.sleep(0.01)
        await available(router, 1)
        await moved(router, workers[0])
        await progress(load, 16)
        await load.stop()
        workers[0].send_to_scheduler(signal.SIGCONT)
        await available(router, 2)
        assert all(worker.in_flight == 0 for worker in router.registry.all())


async def test_a_killed_routers_stream_breaks_and_its_seed_gives_equal_text_elsewhere() -> None:
    async with cluster(2) as (router, workers, _):
        doomed = await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                "-m",
                "sapwood.cli.local.tied",
                "sapwood_router",
            ),  # tied: it ends with a test that fails before
            *("--port", "0", "--http-port", "0", "--metrics-port", "0"),
            *("--tokenizer", router._config.tokenizer, "--workers", *(worker.address for worker in workers)),
            stderr=asyncio.subprocess.PIPE,
        )
        line = ""
        while not (found := re.search(r"HTTP listening on \S+:(\d+)", line)):
            line = (await asyncio.wait_for(doomed.stderr.readline(), 60)).decode()
        rest = asyncio.ensure_future(doomed.stderr.read())
        body = {"prompt": [5, 6, 7], "max_tokens": 480, "seed": 7, "stream": True, "detokenize": False}
        async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
            while (await http.get(f"http://127.0.0.1:{found[1]}/health")).status_code != 200:
                await asyncio.sleep(0.02)
            events: list[str] = []
            with pytest.raises(httpx.TransportError):
                async with http.stream("POST", f"http://127.0.0.1:{found[1]}/v1/completions", json=body) as answer:
                    async for event in answer.aiter_lines():
                        events += filter(None, [event])
                        if len(events) == 3:
                            doomed.kill()
            await asyncio.gather(doomed.wait(), rest)
            assert "[DONE]" not in events[-1] and "error" not in events[-1]
            received = [token for event in events for token in json.loads(event[6:])["choices"][0]["token_ids"]]
            again = await http.post(
                f"http://127.0.0.1:{router.http_port}/v1/completions",
                json={**body, "stream": False, "max_tokens": len(received) + 3},
            )
        answer = again.json()["choices"][0]["token_ids"]
        assert len(answer) == len(received) + 3
        assert 0 < len(received) < 480
        assert answer[: len(received)] == received


async def test_a_deadline_holds_while_the_only_worker_hangs() -> None:
    async with cluster(1, worker_silence=1, resume_grace=120) as (_, workers, stub):
        request = router_pb2.RouterGenerateRequest()
        request.tokens.ids.extend([5, 6])
        request.sampling.max_tokens = 400
        for seconds in (2, 20, 60):  # where the machine is slow, the first may pass before there is a token
            call = aiter(stub.Generate(request, timeout=seconds))
            with contextlib.suppress(grpc.aio.AioRpcError):
                await anext(call)
                break
        workers[0].send(signal.SIGSTOP)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.slow
async def test_a_worker_that_gets_its_cpu_in_pieces_is_not_lost_but_one_that_gets_none_is() -> None:
    async with cluster(1, worker_silence=1) as (router, workers, stub):
        (worker,) = workers

        async def stop_for(seconds: float) -> float:
            begun = time.monotonic()
            worker.send(signal.SIGSTOP)
            await asyncio.sleep(seconds)
            worker.send(signal.SIGCONT)
            return time.monotonic() - begun

        load = Load(stub, streams=2, seed=1)
        for _ in range(10):  # where the machine itself stands still, a stop takes longer than was meant
            for _ in range(4):
                await stop_for(0.4)
                await asyncio.sleep(0.3)
            before, limit = losses_of(router, worker), router._silence_limit.seconds(known_as(router, worker).loop_lag)
            if await stop_for(1.3) < limit - 0.3:
                break
            await available(router, 1)
        assert limit > 1.6
        assert losses_of(router, worker) == before
        await progress(load, 2)
        await load.stop()
        worker.send(signal.SIGSTOP)
        await available(router, 0)
        worker.send(signal.SIGCONT)
        await available(router, 1)
        assert losses_of(router, worker) == before + 1


@pytest.mark.slow
async def test_a_machine_with_too_much_to_do_loses_no_worker() -> None:
    async with cluster(2, worker_silence=1) as (router, workers, stub):
        hogs = [
            await asyncio.create_subprocess_exec(sys.executable, "-c", "while True: pass")
            for _ in range(8 * (os.cpu_count() or 1))
        ]
        try:
            load = Load(stub, streams=8, seed=1)
            await progress(load, 60)
            await load.stop()
            assert load.resumed == 0
            assert not any(losses_of(router, worker) for worker in workers)
            workers[0].send(signal.SIGSTOP)
            await available(router, 1)
            workers[0].send(signal.SIGCONT)
            await available(router, 2)
        finally:
            for hog in hogs:
                hog.kill()
                await hog.wait()


@pytest.mark.slow
async def test_ranks_of_two_groups_killed_and_stopped_in_turn_lose_and_change_no_answer() -> None:
    async with cluster(2, flags=("--tensor-parallel", "2")) as (router, groups, stub):
        load = Load(stub, 8, seed=5)
        # Each rank is killed and stopped once; each group loses two, as a third within two minutes would be waited for.
        for number, ranks in ((signal.SIGKILL, (0, 1)), (signal.SIGSTOP, (1, 0))):
            for group, rank in zip(groups, ranks, strict=True):
                await progress(load, 12)
                before = group.ranks()
                os.kill(before[rank], number)
                async with asyncio.timeout(60):
                    while len(now := group.ranks()) != 2 or set(now) & set(before):
                        await asyncio.sleep(0.02)
                await available(router, 2)
        await progress(load, 12)
        await load.stop()
        assert load.done >= 60
        assert load.resumed > 0
