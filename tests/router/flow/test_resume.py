"""Streams whose worker is lost continue, on another one, as if nothing had happened. Fakes in this process."""

import asyncio
import time

import grpc
import pytest

from sapwood.v1 import router_pb2
from sapwood_common import errors
from sapwood_testing.router.fake_worker import FakeWorker

# A fake's answer to a prompt is a countdown of its last token: what follows depends on where the tokens before it end.
START = 90
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


def countdown(prompt) -> list[int]:
    return list(range(prompt[-1] - 1, 40, -1))


WHOLE = [*countdown([START]), 1]


@pytest.fixture
async def cluster(make_cluster):
    async with make_cluster(3) as running:
        for worker in running.workers:
            worker.script.tokens = countdown
            worker.script.delay = 0.005
        yield running


def hold(cluster, tokens: int) -> asyncio.Event:
    """Nobody says more than so many tokens of an answer before the event is set: no stream ends before it is disturbed."""
    gate = asyncio.Event()
    for worker in cluster.workers:
        worker.script.gate, worker.script.gate_after = gate, tokens
    return gate


def start(cluster, *, stop=(), model=None, **sampling):
    request = router_pb2.RouterGenerateRequest(stop=list(stop), model=model)
    request.tokens.ids.extend([2, 7, START])
    for name, value in sampling.items():
        setattr(request.sampling, name, value)
    return cluster.stub.Generate(request, timeout=60)


async def finish(call, responses) -> list:
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    return responses


def tokens_of(responses) -> list[int]:
    return [token for response in responses for token in response.token_ids]


def text_of(responses) -> str:
    return "".join(response.text for response in responses)


def running(cluster) -> list:
    return [w for w in cluster.workers if any(call.outcome == "running" for call in w.calls)]


def busy(cluster):
    return running(cluster)[0]


async def metadata_of(call) -> dict:
    return dict(await call.trailing_metadata())


async def kill(worker) -> None:
    await worker.kill()


async def hang(worker) -> None:
    worker.silent = True


async def fail(worker) -> None:
    worker.script.error, worker.script.fail_after = errors.UnavailableError("the scheduler stopped"), 20


@pytest.mark.parametrize("lose", [kill, hang, fail])
async def test_a_stream_goes_on_where_it_was_with_the_right_usage(make_cluster, lose) -> None:
    # The others must not fall silent by themselves, however slow the machine is.
    async with make_cluster(3, worker_silence=3 if lose is hang else 30) as cluster:
        for worker in cluster.workers:
            worker.script.tokens, worker.script.delay = countdown, 0.005
        undisturbed = await finish(start(cluster), [])
        gate = hold(cluster, 15)
        call = start(cluster)
        responses = [await call.read()]
        await lose(busy(cluster))
        gate.set()
        await finish(call, responses)
        assert tokens_of(responses) == tokens_of(undisturbed) == WHOLE
        assert text_of(responses) == text_of(undisturbed)
        usage = responses[-1].usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (3, len(WHOLE))
        assert usage.cached_tokens <= 3
        metadata = await metadata_of(call)
        assert metadata["x-sapwood-resumptions"] == "1"
        assert metadata["x-sapwood-worker"] in {cluster.id_of(worker) for worker in cluster.workers}
        await cluster.idle()


async def test_the_next_worker_gets_all_tokens_the_rest_of_max_tokens_and_the_seed(cluster) -> None:
    gate = hold(cluster, 15)
    call = start(cluster, max_tokens=30, temperature=1.0)
    responses = [await call.read()]
    first = busy(cluster)
    await first.kill()
    gate.set()
    await finish(call, responses)
    (before,) = first.calls
    (after,) = [seen for worker in cluster.workers if worker is not first for seen in worker.calls]
    sent = list(after.request.token_ids)[3:]
    assert sent
    assert list(after.request.token_ids) == [2, 7, START, *WHOLE[: len(sent)]]
    assert after.request.sampling.max_tokens == 30 - len(sent)
    assert after.request.sampling.seed == before.request.sampling.seed
    assert before.request.sampling.HasField("seed")
    assert after.request.request_id != before.request.request_id
    assert tokens_of(responses) == WHOLE[:30]
    assert responses[-1].usage.completion_tokens == 30


async def test_a_prompt_of_very_many_tokens_comes_whole_to_both_workers(make_cluster) -> None:
    async with make_cluster(2) as cluster:
        for worker in cluster.workers:
            worker.script.tokens = countdown
        prompt = [*range(2, 90_000), START]
        gate = hold(cluster, 5)
        request = router_pb2.RouterGenerateRequest()
        request.tokens.ids.extend(prompt)
        call = cluster.stub.Generate(request, timeout=60)
        responses = [await call.read()]
        first = busy(cluster)
        await first.kill()
        gate.set()
        await finish(call, responses)
        (after,) = [seen for worker in cluster.workers if worker is not first for seen in worker.calls]
        assert list(first.calls[0].request.token_ids) == prompt
        sent = list(after.request.token_ids)[len(prompt) :]
        assert sent
        assert list(after.request.token_ids) == [*prompt, *WHOLE[: len(sent)]]
        assert tokens_of(responses) == WHOLE
        assert responses[-1].usage.prompt_tokens == len(prompt)


async def test_a_text_of_very_many_tokens_comes_whole_and_is_told(make_cluster) -> None:
    async with make_cluster(1) as cluster:
        text = "".join(chr(97 + number * number % 26) for number in range(70_000))
        body = {"prompt": text, "max_tokens": 1, "return_token_ids": True}
        answer = await cluster.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        (seen,) = cluster.workers[0].calls
        sent = list(seen.request.token_ids)
        assert sent == answer.json()["choices"][0]["prompt_token_ids"]
        assert bytes(token - 3 for token in sent if token >= 3).decode() == text


async def test_a_stop_string_across_the_loss_is_found(cluster) -> None:
    text = text_of(await finish(start(cluster), []))
    stop = text[20:34]
    gate = hold(cluster, 27)
    call = start(cluster, stop=[stop])
    responses = [await call.read()]
    while len(tokens_of(responses)) < 12:
        responses.append(await call.read())
    await busy(cluster).kill()
    gate.set()
    await finish(call, responses)
    assert text_of(responses) == text[:20]
    assert responses[-1].stop_match == stop


async def test_over_http_it_is_the_same_stream(cluster) -> None:
    body = {"prompt": [2, 7, START], "stream": True, "max_tokens": 100, "stream_options": {"include_usage": True}}
    texts = []
    for disturbed in (False, True):
        gate = hold(cluster, 20)
        if not disturbed:
            gate.set()
        async with cluster.http.stream("POST", "/v1/completions", json=body) as response:
            lines = []
            async for line in response.aiter_lines():
                lines.append(line)
                if disturbed and len(lines) == 1:
                    await busy(cluster).kill()
                    gate.set()
        assert lines[-2] == "data: [DONE]"
        import json

        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        texts.append("".join(c["text"] for event in events for c in event["choices"]))
        assert events[-1]["usage"]["completion_tokens"] == len(WHOLE)
        assert not any("error" in event for event in events)
        last = next(event for event in events if event["choices"] and event["choices"][0]["finish_reason"])
        assert last.get("x-sapwood-resumptions") == (1 if disturbed else None)
    assert texts[0] == texts[1]


async def test_a_whole_http_answer_names_its_worker_and_its_resumptions(cluster, wait_until) -> None:
    body = {"prompt": [2, 7, START], "max_tokens": 100}
    plain = await cluster.http.post("/v1/completions", json=body)
    assert plain.headers["x-sapwood-resumptions"] == "0"
    assert plain.headers["x-sapwood-worker"] in {cluster.id_of(worker) for worker in cluster.workers}
    gate = asyncio.Event()
    for worker in cluster.workers:
        worker.script.gate, worker.script.gate_after = gate, 3
    asked = asyncio.ensure_future(cluster.http.post("/v1/completions", json=body))
    workers = cluster.router.registry.all()
    await wait_until(lambda: any(worker.in_flight and not worker.pending_tokens for worker in workers))  # a token came
    lost = busy(cluster)
    await lost.kill()
    gate.set()
    resumed = await asked
    assert resumed.json()["choices"] == plain.json()["choices"]
    assert resumed.headers["x-sapwood-worker"] not in ("-", cluster.id_of(lost))
    assert resumed.headers["x-sapwood-resumptions"] == "1"


async def test_three_losses_are_survived_and_a_fourth_ends_the_request(make_cluster, expect_error, wait_until) -> None:
    for losses in (3, 4):
        async with make_cluster(5) as cluster:
            for worker in cluster.workers:
                worker.script.tokens, worker.script.delay = countdown, 0.02
            gate = hold(cluster, 5)
            call = start(cluster)
            responses = []
            for _ in range(losses):
                responses.append(await call.read())
                await busy(cluster).kill()
                await wait_until(lambda call=call, cluster=cluster: call.done() or running(cluster))
            gate.set()
            if losses == 3:
                assert tokens_of(await finish(call, responses)) == WHOLE
                assert (await metadata_of(call))["x-sapwood-resumptions"] == "3"
            else:
                await expect_error(finish(call, responses), UNAVAILABLE)
            await cluster.idle()


async def test_with_no_other_worker_the_stream_waits_for_one(make_cluster) -> None:
    async with make_cluster(1, resume_grace=60) as cluster:
        (worker,) = cluster.workers
        worker.script.tokens, worker.script.delay = countdown, 0.01
        gate = hold(cluster, 15)
        call = start(cluster)
        responses = [await call.read()]
        await worker.kill()
        gate.set()
        await asyncio.sleep(0.3)
        await worker.start()
        assert tokens_of(await finish(call, responses)) == WHOLE


async def test_a_stream_whose_model_nobody_serves_for_now_waits_too(make_cluster, wait_until) -> None:
    async with make_cluster(1, resume_grace=20) as cluster:
        old, new = FakeWorker("other"), FakeWorker("other")
        for worker in (old, new):
            worker.script.tokens, worker.script.delay = countdown, 0.01
            await worker.start()
        try:
            await cluster.stub.RegisterWorker(router_pb2.RegisterWorkerRequest(address=old.address))
            await wait_until(lambda: "other" in cluster.router.registry.models())
            call = start(cluster, model="other")
            responses = [await call.read()]
            await cluster.stub.RemoveWorker(router_pb2.RemoveWorkerRequest(address=old.address))
            await wait_until(lambda: "other" not in cluster.router.registry.models())
            await asyncio.sleep(0.1)
            await cluster.stub.RegisterWorker(router_pb2.RegisterWorkerRequest(address=new.address))
            assert tokens_of(await finish(call, responses)) == WHOLE
        finally:
            for worker in (old, new):
                await worker.kill()


async def test_a_draining_worker_takes_nothing_new_and_its_streams_finish(cluster, wait_until) -> None:
    gate = hold(cluster, 15)
    call = start(cluster)
    responses = [await call.read()]
    worker = busy(cluster)
    await worker.set_serving(False)
    await wait_until(lambda: len(cluster.router.registry.available("fake")) == 2)
    gate.set()
    assert tokens_of(await finish(call, responses)) == WHOLE
    assert (await metadata_of(call))["x-sapwood-resumptions"] == "0"
    await worker.set_serving(True)
    await wait_until(lambda: len(cluster.router.registry.available("fake")) == 3)


async def test_a_request_that_breaks_two_workers_ends(cluster, expect_error) -> None:
    for worker in cluster.workers:
        worker.script.error, worker.script.fail_after = errors.InternalError("boom"), 2
    await expect_error(finish(start(cluster), []), grpc.StatusCode.INTERNAL)
    assert len(cluster.calls()) == 2


async def test_a_client_error_and_a_deadline_in_mid_stream_are_not_resumed(cluster, expect_error) -> None:
    for worker in cluster.workers:
        worker.script.error, worker.script.fail_after = errors.InvalidArgumentError("no", field="token_ids"), 2
    await expect_error(finish(start(cluster), []), grpc.StatusCode.INVALID_ARGUMENT)
    assert len(cluster.calls()) == 1


async def test_a_worker_that_fails_every_request_is_left_alone_and_taken_back(make_cluster, wait_until) -> None:
    async with make_cluster(2, breaker_open_seconds=0.3, policy="round_robin") as cluster:
        bad = cluster.workers[0]
        bad.script.error, bad.script.fail_after = errors.InternalError("boom"), 0
        begun, probes, wait = time.monotonic(), 0, 0.3
        for _ in range(20):
            assert text_of(await cluster.generate("abc")) == "abc"
        left = time.monotonic() - begun
        while left >= wait:  # each that fails doubles the time to the next
            left, wait, probes = left - wait, 2 * wait, probes + 1
        assert 5 <= len(bad.calls) <= 5 + probes
        bad.script.error = None
        worker = next(w for w in cluster.router.registry.all() if w.address == bad.address)
        await wait_until(worker.breaker.admits)
        before = len(bad.calls)
        for _ in range(10):
            await cluster.generate("abc")
        assert len(bad.calls) >= before + 4
