import pytest
from prometheus_client.parser import text_string_to_metric_families

from sapwood.v1 import router_pb2


async def samples(cluster) -> dict[tuple[str, frozenset], float]:
    response = await cluster.http.get("/metrics")
    assert response.status_code == 200
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def named(**labels: str) -> frozenset:
    return frozenset(labels.items())


async def test_a_request_is_counted_timed_and_its_tokens_are(cluster) -> None:
    responses = await cluster.generate("abcdef", sampling={"max_tokens": 4})
    usage = responses[-1].usage
    found = await samples(cluster)
    assert found["sapwood_router_requests_total", named(model="fake", code="OK")] == 1
    assert found["sapwood_router_completion_tokens_total", named(model="fake")] == usage.completion_tokens
    assert found["sapwood_router_prompt_tokens_total", named(model="fake")] == usage.prompt_tokens
    assert found["sapwood_router_time_to_first_token_seconds_count", named(model="fake")] == 1
    assert found["sapwood_router_running_requests", frozenset()] == 0
    for stage in ("prepare", "queue", "select", "acquire", "build", "dispatch", "execute", "respond"):
        assert found["sapwood_router_stage_seconds_count", named(stage=stage)] == 1, stage
    assert sum(v for (name, _), v in found.items() if name == "sapwood_router_selections_total") == 1
    assert found["sapwood_rpc_calls_total", named(method="/sapwood.v1.Router/Generate", code="OK")] == 1
    for worker in cluster.workers:
        assert found["sapwood_router_worker_available", named(worker=worker.address)] == 1


async def test_workers_are_counted_and_forgotten_with_all_their_series(cluster, wait_until) -> None:
    gone, stays = (worker.address for worker in cluster.workers)
    breaker = next(worker.breaker for worker in cluster.router.registry.all() if worker.address == stays)
    states: list[float] = []
    await cluster.workers[0].kill()
    await wait_until(lambda: len(cluster.router.registry.available("fake")) == 1)
    while states != [2]:  # this may look only after the second that it is open
        for _ in range(5):
            breaker.fault()
        states = [(await samples(cluster))["sapwood_router_worker_breaker_state", named(worker=stays)]]
    while len(states) < 2:
        state = (await samples(cluster))["sapwood_router_worker_breaker_state", named(worker=stays)]
        states += [state] if states[-1:] != [state] else []
    assert states == [2, 1]  # a probe closes it
    await cluster.generate("abc")
    found = await samples(cluster)
    assert found["sapwood_router_worker_breaker_state", named(worker=stays)] == 0
    assert found["sapwood_router_available_workers", frozenset()] == 1
    assert found["sapwood_router_worker_losses_total", named(worker=gone)] == 1
    for address in (gone, stays):
        await cluster.stub.RemoveWorker(router_pb2.RemoveWorkerRequest(address=address))
    found = await samples(cluster)
    assert found["sapwood_router_available_workers", frozenset()] == 0
    assert not any("worker" in dict(labels) for _, labels in found)


async def test_models_that_clients_make_up_are_no_labels(cluster) -> None:
    for name in ("gpt-9", "x" * 200):
        with pytest.raises(Exception, match="there is no model"):
            await cluster.generate("abc", model=name)
    found = await samples(cluster)
    assert found["sapwood_router_requests_total", named(model="-", code="NOT_FOUND")] == 2
    assert not any("gpt-9" in value or "x" * 200 in value for _, labels in found for _, value in labels)


async def test_a_client_that_leaves_is_counted_cancelled(cluster, wait_until) -> None:
    for worker in cluster.workers:
        worker.script.delay = 0.05
    call = cluster.stub.Generate(router_pb2.RouterGenerateRequest(text="abcdefghijklmnop" * 20))
    await call.read()
    call.cancel()
    await cluster.idle()
    found = await samples(cluster)
    assert found["sapwood_router_requests_total", named(model="fake", code="CANCELLED")] == 1
    assert found["sapwood_router_running_requests", frozenset()] == 0
