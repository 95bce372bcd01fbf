"""Workers and tokenizers that go away, and come back."""

import asyncio

import grpc
import pytest

from sapwood.v1 import router_pb2
from sapwood_common import errors

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


def text_of(responses) -> str:
    return "".join(response.text for response in responses)


async def test_a_worker_that_is_gone_is_replaced_before_the_first_token(cluster) -> None:
    await cluster.workers[0].kill()
    texts = await asyncio.gather(*(cluster.generate(f"text {number}") for number in range(20)))
    assert [text_of(t) for t in texts] == [f"text {number}" for number in range(20)]
    await cluster.idle()


async def test_a_worker_killed_before_its_first_token_is_replaced(cluster, wait_until) -> None:
    for worker in cluster.workers:
        worker.script.gate = asyncio.Event()
    running = asyncio.ensure_future(cluster.generate("abc"))
    await wait_until(lambda: len(cluster.calls()) == 1)
    victim, other = sorted(cluster.workers, key=lambda worker: -len(worker.calls))
    other.script.gate.set()
    await victim.kill()
    assert text_of(await running) == "abc"
    assert len(other.calls) == 1
    await cluster.idle()


async def test_a_busy_worker_is_passed_over_and_its_refusal_is_told_when_all_are_busy(cluster, expect_error) -> None:
    full = errors.ResourceExhaustedError("queue full", retry_after=2.25)
    for worker in cluster.workers:
        worker.script.error, worker.script.fail_after = full, 0
    cluster.workers[0].script.fail_after = None
    for number in range(8):
        assert text_of(await cluster.generate(f"{number}")) == f"{number}"
    cluster.workers[0].script.fail_after = 0
    message, _ = await expect_error(cluster.generate("abc"), grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert message == "queue full"
    response = await cluster.http.post("/v1/completions", json={"prompt": "abc"})
    delays = [response.headers[name] for name in ("retry-after", "retry-after-ms")]
    assert (response.status_code, delays) == (429, ["3", "2250"])
    assert all(worker.available for worker in cluster.router.registry.all())


async def test_a_client_error_is_not_tried_elsewhere(cluster, expect_error) -> None:
    for worker in cluster.workers:
        worker.script.error = errors.InvalidArgumentError("token 300 of 259", field="token_ids")
        worker.script.fail_after = 0
    assert (await expect_error(cluster.generate("abc"), grpc.StatusCode.INVALID_ARGUMENT))[1] == "text"
    assert len(cluster.calls()) == 1


@pytest.mark.parametrize("how", ["killed", "unavailable", "silent"])
async def test_a_worker_lost_in_mid_stream_ends_the_request_only_if_no_other_comes(
    make_cluster, expect_error, how
) -> None:
    async with make_cluster(1) as cluster:
        script = cluster.workers[0].script
        script.delay = 0.02
        if how == "killed":
            script.gate, script.gate_after = asyncio.Event(), 3
        elif how == "unavailable":
            script.error, script.fail_after = errors.UnavailableError("no more"), 3
        else:
            script.tokens, script.reason = lambda prompt: [100, 101, 102], 0  # ends without a finish
        stream = aiter(cluster.stub.Generate(router_pb2.RouterGenerateRequest(text="abcdef")))
        assert (await anext(stream)).text
        if how == "killed":
            await cluster.workers[0].kill()

        async def rest() -> None:
            async for _ in stream:
                pass

        await expect_error(rest(), UNAVAILABLE)
        await cluster.idle()


async def test_a_stream_of_events_that_cannot_go_on_ends_with_an_error_event_without_done(make_cluster) -> None:
    async with make_cluster(1) as cluster:
        cluster.workers[0].script.error = errors.UnavailableError("no more")
        cluster.workers[0].script.fail_after = 3
        cluster.workers[0].script.delay = 0.02
        response = await cluster.http.post("/v1/completions", json={"prompt": "abcdef", "stream": True})
        assert response.status_code == 200
        *texts, last = response.text.strip().split("\n\n")
        assert texts
        assert '"service_unavailable_error"' in last
        assert "[DONE]" not in response.text
        response = await cluster.http.post("/v1/completions", json={"prompt": "abcdef"})
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1


async def test_with_no_worker_left_requests_fail_at_once_and_a_restarted_worker_is_found(
    make_cluster, expect_error, wait_until
) -> None:
    async with make_cluster(1) as cluster:
        assert text_of(await cluster.generate("abcdefgh")) == "abcdefgh"
        await cluster.workers[0].kill()
        await expect_error(cluster.generate("abcdefgh"), UNAVAILABLE)
        (worker,) = (await cluster.stub.ListWorkers(router_pb2.ListWorkersRequest())).workers
        assert not worker.healthy
        response = await cluster.http.post("/v1/completions", json={"prompt": "abc"})
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        await cluster.workers[0].start()
        await wait_until(cluster.router.registry.any_available)
        assert text_of(await cluster.generate("abcdefgh")) == "abcdefgh"


async def test_a_restarted_worker_is_believed_to_hold_nothing(make_cluster, wait_until, caplog) -> None:
    async with make_cluster(1) as cluster:
        for _ in range(2):
            await cluster.generate("a prompt of several pages")
        await cluster.workers[0].kill()
        await cluster.workers[0].start()
        (seen,) = cluster.router.registry.all()
        await wait_until(lambda: seen.model.epoch == cluster.workers[0].epoch)
        caplog.set_level("INFO")
        await cluster.generate("a prompt of several pages")
        assert "reason=cache_miss" in caplog.text
        await cluster.generate("a prompt of several pages")
        assert "reason=cache_hit" in caplog.text


async def test_a_router_starts_before_its_services_and_serves_once_they_are_there(make_cluster, wait_until) -> None:
    async with make_cluster(1) as cluster:
        await cluster.tokenizer.kill()
        await cluster.workers[0].kill()
        from sapwood_router.app import RouterApplication
        from sapwood_router.config import RouterConfig

        config = RouterConfig(
            port=0, http_port=0, tokenizer=cluster.tokenizer.address, workers=(cluster.workers[0].address,)
        )
        early = RouterApplication(config)
        await early.start()
        await wait_until(lambda: "UNAVAILABLE" in (early.problem() or ""))
        await cluster.tokenizer.start()
        await wait_until(lambda: "no worker" in (early.problem() or ""))
        await cluster.workers[0].start()
        await wait_until(lambda: early.problem() is None)
        await early.stop()


async def test_running_streams_do_not_notice_a_restart_of_the_tokenizer(cluster) -> None:
    for worker in cluster.workers:
        worker.script.delay = 0.002
    texts = [f"{number}: " + "wörd 🌲 " * 60 for number in range(8)]
    requests = [router_pb2.RouterGenerateRequest(text=text, stop=["%"]) for text in texts]
    streams = [aiter(cluster.stub.Generate(request)) for request in requests]
    firsts = [(await anext(stream)).text for stream in streams]
    assert all(firsts)
    for _ in range(2):
        await asyncio.sleep(0.1)
        await cluster.tokenizer.kill()
        await asyncio.sleep(0.2)
        await cluster.tokenizer.start()

    async def rest(stream) -> str:
        return "".join([response.text async for response in stream])

    rests = await asyncio.gather(*map(rest, streams))
    assert [first + more for first, more in zip(firsts, rests, strict=True)] == texts
    assert text_of(await cluster.generate("and new ones work")) == "and new ones work"
    await cluster.idle()


async def test_a_tokenizer_that_stays_away_fails_new_requests_only(make_cluster, expect_error, wait_until) -> None:
    async with make_cluster(1, tokenizer_grace=0.4) as cluster:
        gate = cluster.workers[0].script.gate = asyncio.Event()
        cluster.workers[0].script.gate_after = 2
        stream = aiter(cluster.stub.Generate(router_pb2.RouterGenerateRequest(text="ünï <b> " * 60, stop=["%"])))
        first = await anext(stream)
        await cluster.tokenizer.kill()
        await wait_until(lambda: cluster.router.problem() is not None)
        await expect_error(cluster.generate("abc"), UNAVAILABLE)
        gate.set()
        assert first.text + "".join([response.text async for response in stream]) == "ünï <b> " * 60
        await cluster.idle()


async def test_requests_wait_beyond_the_grace_while_a_tokenizer_is_starting(make_cluster) -> None:
    text = "x" * 400
    async with make_cluster(1, tokenizer_grace=0.5) as cluster:
        cluster.workers[0].script.delay = 0.01
        running = aiter(cluster.stub.Generate(router_pb2.RouterGenerateRequest(text=text)))
        first = (await anext(running)).text
        await cluster.tokenizer.kill()
        await cluster.tokenizer.begin_to_start()
        new = asyncio.ensure_future(cluster.generate("abc"))
        await asyncio.sleep(1.5)
        assert not new.done()
        await cluster.tokenizer.kill()
        await cluster.tokenizer.start()
        assert first + "".join([response.text async for response in running]) == text
        assert text_of(await new) == "abc"


async def test_a_request_while_the_tokenizer_restarts_waits_for_it(cluster) -> None:
    await cluster.tokenizer.kill()
    waiting = asyncio.ensure_future(cluster.generate("abc"))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    await cluster.tokenizer.start()
    assert text_of(await waiting) == "abc"
