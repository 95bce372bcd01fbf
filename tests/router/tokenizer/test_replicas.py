"""Several replicas of the tokenizer: one that dies or hangs under load costs no request."""

import asyncio
import contextlib
import signal
import time

import grpc
import openai
import pytest

from sapwood_router.app import RouterApplication
from sapwood_router.config import RouterConfig
from sapwood_router.tokenizer.replica import TokenizerReplica
from sapwood_router.transport.name_lookup import addresses_behind, name_in
from sapwood_testing.router.fake_tokenizer import FakeTokenizer
from sapwood_testing.router.fake_worker import FakeWorker

TEXT = "Ünïcode " * 20
REQUESTS = 12


def replicas_of(router: RouterApplication) -> tuple[TokenizerReplica, ...]:
    return router._tokenizers.of(None).replicas.all()


@contextlib.asynccontextmanager
async def running_router(wait_until, tokenizers: str, worker: FakeWorker, lookup=addresses_behind, grace: float = 60):
    await worker.start()
    config = RouterConfig(
        port=0, http_port=0, tokenizer=tokenizers, workers=(worker.address,), health_interval=0.1, request_timeout=120,
        worker_silence=60, tokenizer_grace=grace,
    )  # fmt: skip
    router = RouterApplication(config, lookup)
    await router.start()
    try:
        await wait_until(lambda: router.problem() is None)
        await wait_until(lambda: all(replica.encodings.up for replica in replicas_of(router)))
        url = f"http://127.0.0.1:{router.http_port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
            yield router, client
    finally:
        await router.stop()
        await worker.kill()


async def complete(client: openai.AsyncOpenAI) -> str:
    stream = await client.completions.create(model="fake", prompt=TEXT, stream=True, max_tokens=1000)
    return "".join([chunk.choices[0].text async for chunk in stream])


async def test_running_streams_go_on_when_every_replica_is_lost(wait_until) -> None:
    fakes, worker = [FakeTokenizer(), FakeTokenizer()], FakeWorker()
    worker.script.gate, worker.script.gate_after = asyncio.Event(), 50
    for fake in fakes:
        await fake.start()
    addresses = ",".join(fake.address for fake in fakes)
    async with running_router(wait_until, addresses, worker) as (router, client):
        answers = [asyncio.ensure_future(complete(client)) for _ in range(REQUESTS)]
        await wait_until(lambda: len(worker.calls) == REQUESTS)
        for fake in fakes:
            await fake.kill()
        await wait_until(lambda: router.problem() is not None)
        worker.script.gate.set()
        assert await asyncio.gather(*answers) == [TEXT] * REQUESTS
        await fakes[0].start()
        assert await complete(client) == TEXT
        await fakes[0].kill()


class ResettingTokenizer(FakeTokenizer):
    """Resets the first call, as a server may that stops."""

    resets = 0

    async def Tokenize(self, request, context):  # noqa: N802 - the method of the protocol
        if not self.resets:
            self.resets += 1
            await context.abort(grpc.StatusCode.CANCELLED)
        return await super().Tokenize(request, context)


async def test_a_call_that_the_tokenizer_resets_is_made_again(wait_until) -> None:
    fake, worker = ResettingTokenizer(), FakeWorker()
    await fake.start()
    try:
        async with running_router(wait_until, fake.address, worker) as (_, client):
            assert await complete(client) == TEXT
        assert fake.resets == 1
    finally:
        await fake.kill()


@pytest.mark.parametrize("how", [pytest.param(signal.SIGKILL, marks=pytest.mark.slow), signal.SIGSTOP])
async def test_a_real_replica_killed_or_stopped_under_load_fails_no_request(wait_until, start_tokenizer, how) -> None:
    worker = FakeWorker()
    worker.script.delay = 0.002
    worker.script.tokens = list
    with start_tokenizer() as first, start_tokenizer() as second:
        addresses = f"{first.address},{second.address}"
        async with running_router(wait_until, addresses, worker) as (_, client):
            left = 60

            async def user() -> list[str]:
                nonlocal left
                texts = []
                while left > 0:
                    left -= 1
                    texts.append(await complete(client))
                return texts

            users = [asyncio.ensure_future(user()) for _ in range(12)]
            await wait_until(lambda: left < 40)
            first.process.send_signal(how)
            texts = [text for texts in await asyncio.gather(*users) for text in texts]
            assert texts == [TEXT] * 60


async def test_while_the_only_one_is_stopped_requests_wait_for_the_grace_and_are_told(
    wait_until, start_tokenizer
) -> None:
    worker = FakeWorker()
    worker.script.tokens = list
    with start_tokenizer() as only:
        async with running_router(wait_until, only.address, worker, grace=0.2) as (router, client):
            only.process.send_signal(signal.SIGSTOP)
            with pytest.raises(openai.InternalServerError) as told:
                await complete(client)
            assert (told.value.status_code, "tokenizer" in told.value.message) == (503, True)
            assert router.problem() is not None
            only.process.send_signal(signal.SIGCONT)
            await wait_until(lambda: router.problem() is None)
            await wait_until(lambda: all(replica.encodings.up for replica in replicas_of(router)))
            assert await complete(client) == TEXT


async def test_the_only_replica_may_stop_while_a_stream_runs(wait_until, start_tokenizer) -> None:
    worker = FakeWorker()
    worker.script.gate, worker.script.gate_after = asyncio.Event(), 3
    worker.script.tokens = list
    with start_tokenizer() as only:
        async with running_router(wait_until, only.address, worker) as (_, client):
            answer = asyncio.ensure_future(complete(client))
            await wait_until(lambda: worker.calls)
            only.process.send_signal(signal.SIGTERM)
            await wait_until(lambda: only.process.poll() is not None, 60)
            assert only.process.returncode == 0
            worker.script.gate.set()
            assert await answer == TEXT


async def test_replicas_behind_one_name_share_work_and_leave_without_a_failure(wait_until, start_tokenizer) -> None:
    worker = FakeWorker()
    worker.script.delay = 0.004
    worker.script.tokens = list
    with contextlib.ExitStack() as processes:
        replicas = [processes.enter_context(start_tokenizer())]
        port = int(replicas[0].address.rpartition(":")[2])
        replicas.append(processes.enter_context(start_tokenizer(port=port, host="127.0.0.2")))
        named = {replica.address for replica in replicas}

        async def lookup(host: str, asked: int) -> frozenset[str]:
            assert (host, asked) == ("tokenizer.prod", port)
            return frozenset(named)

        async with running_router(wait_until, f"tokenizer.prod:{port}", worker, lookup) as (router, client):
            running, failed, done = True, [], 0

            async def user() -> None:
                nonlocal done
                while running:
                    try:
                        assert await complete(client) == TEXT
                        done += 1
                    except Exception as error:
                        failed.append(error)

            async def progress() -> None:
                goal = done + 8
                await wait_until(lambda: failed or done >= goal)

            def at_work() -> set[str]:
                return {replica.address for replica in replicas_of(router) if replica.encodings.up}

            users = [asyncio.ensure_future(user()) for _ in range(8)]
            await wait_until(lambda: at_work() == named)
            first, second = replicas
            first.process.send_signal(signal.SIGTERM)  # it is still behind the name when it begins to drain
            await progress()
            named.discard(first.address)
            await wait_until(lambda: first.process.poll() is not None)
            await progress()
            third = processes.enter_context(start_tokenizer(port=port, host="127.0.0.3"))
            named.add(third.address)
            await wait_until(lambda: third.address in at_work())
            named.discard(second.address)  # before it learns that it is to end
            await wait_until(lambda: at_work() == {third.address})
            second.process.send_signal(signal.SIGTERM)
            await progress()
            running = False
            await asyncio.gather(*users)
            assert failed == []
            assert (first.process.wait(60), second.process.wait(60)) == (0, 0)


def test_what_is_a_name_and_what_is_an_address() -> None:
    assert name_in("tokenizer:50052") == name_in("dns:///tokenizer:50052") == ("tokenizer", 50052)
    assert [name_in(text) for text in ("10.0.0.1:1", "[::1]:1", "unix:/run/t", "ipv4:10.0.0.1:1", "t")] == [None] * 5


async def test_of_both_families_one_is_taken() -> None:
    assert await addresses_behind("localhost", 7) in ({"127.0.0.1:7"}, {"[::1]:7"})


@pytest.mark.parametrize("kind", ["texts", "grammars"])
async def test_a_path_that_swallows_large_packets_costs_a_tokenizer_and_no_request(
    wait_until, start_tokenizer, make_namespace, kind: str
) -> None:
    """Health checks still pass: what the router sends there is what does not arrive."""
    worker = FakeWorker()
    worker.script.delay = 0.002
    worker.script.tokens = list
    namespaces = [make_namespace(), make_namespace()]
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(start_tokenizer(namespace=each)) for each in namespaces]
        addresses = ",".join(process.address for process in processes)
        async with running_router(wait_until, addresses, worker) as (router, client):
            left, longest, stopped = 400, 0.0, False

            async def ask(number: int) -> None:
                if kind == "texts":
                    assert await complete(client) == TEXT
                    return
                names = [f"a{number}_{place}" for place in range(40)]
                schema = {"type": "object", "properties": {name: {"type": "integer"} for name in names}}
                wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
                messages = [{"role": "user", "content": "a"}]
                await client.chat.completions.create(
                    model="fake", messages=messages, response_format=wanted, max_tokens=1
                )

            async def user() -> None:
                nonlocal left, longest
                while left > 0 and not stopped:
                    left -= 1
                    began = time.monotonic()
                    await ask(left)
                    longest = max(longest, time.monotonic() - began)

            users = [asyncio.ensure_future(user()) for _ in range(6)]
            await wait_until(lambda: left < 380)
            namespaces[0].swallow()
            holed = next(
                each for each in router._tokenizers.of(None).client._replicas() if each.address == processes[0].address
            )
            await wait_until(lambda: holed.problem is not None or all(each.done() for each in users))
            assert holed.problem in ("what is sent there does not arrive", "health checks time out")
            goal = left - 40
            await wait_until(lambda: left < goal)
            assert holed.problem is not None, "small packets pass, and that is no reason to choose it"
            namespaces[0].spit()
            await wait_until(lambda: holed.problem is None)
            stopped = True
            await asyncio.gather(*users)
            print(f"{kind}: the longest request took {longest:.1f} s")
