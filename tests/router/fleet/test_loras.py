"""Adapters over a whole router and real worker processes without a model, whose tokens tell which adapter computed them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from sapwood.cli.main import main
from sapwood.v1 import common_pb2, router_pb2, router_pb2_grpc, worker_pb2, worker_pb2_grpc
from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.network.channel import open_channel
from sapwood_router.app import RouterApplication
from sapwood_router.config import RouterConfig
from sapwood_testing.router.fake_tokenizer import FakeTokenizer
from sapwood_testing.router.worker_process import VOCAB, WorkerProcess
from sapwood_testing.worker.fake_runner import continuation, fake_digest, fake_lora

PROMPT = [40 + n % 50 for n in range(40)]
SLOTS = ("--lora-slots", "4,rank=16", "--embedding-size", "1")


class Fleet:
    """Workers, and routers in front of them, each with clients."""

    def __init__(self, workers: list[WorkerProcess], routers: list[RouterApplication]) -> None:
        self.workers = workers
        self.routers = routers
        self.channels = [open_channel(f"127.0.0.1:{router.grpc_port}") for router in routers]
        self.stubs: list[Any] = [router_pb2_grpc.RouterStub(channel) for channel in self.channels]
        self.stub = self.stubs[0]
        url = f"http://127.0.0.1:{routers[0].http_port}"
        self.http = httpx.AsyncClient(base_url=url, timeout=60, trust_env=False)

    async def ask(self, model: str | None, count: int = 6, stub: Any = None, **fields: Any) -> list[int]:
        request = router_pb2.RouterGenerateRequest(
            tokens=common_pb2.TokenIds(ids=PROMPT),
            sampling=common_pb2.SamplingParams(seed=7, max_tokens=count),
            detokenize=False,
            whole=True,
            **fields,
        )
        if model is not None:
            request.model = model
        return [token async for part in (stub or self.stub).Generate(request, timeout=60) for token in part.token_ids]

    async def on_worker(self, number: int) -> dict[str, worker_pb2.LoraState]:
        """The adapters in a worker's memory."""
        async with grpc.aio.insecure_channel(self.workers[number].address) as channel:
            answer = await worker_pb2_grpc.WorkerStub(channel).ListLoras(worker_pb2.ListLorasRequest())
        return {each.state.name: each.state for each in answer.loras if each.state.digest}

    async def list(self) -> dict[str, router_pb2.FleetLora]:
        return {each.name: each for each in (await self.stub.ListLoras(router_pb2.RouterListLorasRequest())).loras}


def expected(folder: Path | None, count: int = 6) -> list[int]:
    digest = b"" if folder is None else fake_digest(folder)
    return list(islice(continuation(PROMPT, SamplingParams(seed=7), VOCAB, digest), count))


@contextlib.asynccontextmanager
async def fleet(
    count: int = 2, routers: int = 1, flags: Sequence[str] = SLOTS, each: Sequence[Sequence[str]] = (), **settings: Any
) -> AsyncIterator[Fleet]:
    tokenizer = FakeTokenizer()
    await tokenizer.start()
    workers = [WorkerProcess(flags=[*flags, *(each[number] if each else ())]) for number in range(count)]
    await asyncio.gather(*(worker.start() for worker in workers))
    settings = {"worker_silence": 60, "resume_grace": 60, "tokenizer_grace": 60, "queue_wait": 120, **settings}
    addresses = tuple(worker.address for worker in workers)
    config = RouterConfig(port=0, http_port=0, tokenizer=tokenizer.address, workers=addresses, **settings)
    made = [RouterApplication(config, make_parser=tokenizer.make_parser) for _ in range(routers)]
    for router in made:
        await router.start()
    found = Fleet(workers, made)
    try:
        async with asyncio.timeout(120):
            while not all(
                router.problem() is None and all(worker.available for worker in router.registry.all())
                for router in made
            ):
                await asyncio.sleep(0.02)
        yield found
    finally:
        await found.http.aclose()
        for channel in found.channels:
            await channel.close()
        for router in made:
            await router.stop()
        for worker in workers:
            await worker.kill()
        await tokenizer.kill()


async def refusal(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code()


async def test_every_api_names_adapters_by_model_and_by_name(tmp_path: Path) -> None:
    x = fake_lora(tmp_path / "x", "weights")
    async with fleet() as cluster:
        http = cluster.http
        said = await http.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": str(x)})
        assert (said.status_code, said.text) == (200, "Success: LoRA adapter 'x' added successfully.")
        for name in ("x", "fake:x"):
            assert await cluster.ask(name) == expected(x)
        assert await cluster.ask(None, lora_name="x") == await cluster.ask("fake", lora_name="x") == expected(x)
        assert await cluster.ask(None) == await cluster.ask("fake") == expected(None)
        body = {"prompt": PROMPT, "max_tokens": 6, "seed": 7, "return_token_ids": True}
        for model in ("x", "fake:x"):
            answer = (await http.post("/v1/completions", json=body | {"model": model})).json()
            assert answer["model"] == model and answer["choices"][0]["token_ids"] == expected(x)
        answer = (await http.post("/v1/completions", json=body | {"lora_path": "x"})).json()
        assert answer["choices"][0]["token_ids"] == expected(x)
        native = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 6, "sampling_seed": 7}}
        texts = [(await http.post("/generate", json=native | more)).json()["text"] for more in ({}, {"lora_path": "x"})]
        assert texts[0] != texts[1]
        both = native | {"input_ids": [PROMPT, PROMPT], "lora_path": [None, "x"]}
        assert [each["text"] for each in (await http.post("/generate", json=both)).json()] == texts
        turns = {"messages": [{"role": "user", "content": "hi"}], "seed": 7}
        for path, more, read in (
            ("/v1/chat/completions", {"max_tokens": 9}, lambda told: told["choices"][0]["message"]["content"]),
            ("/v1/messages", {"max_tokens": 9}, lambda told: told["content"][0]["text"]),
            (
                "/api/chat",
                {"stream": False, "options": {"num_predict": 9, "seed": 7}},
                lambda told: told["message"]["content"],
            ),
            ("/v2/chat", {"max_tokens": 9}, lambda told: told["message"]["content"][0]["text"]),
        ):
            told = {}
            for model in ("fake", "x", "fake:x"):
                answer = await http.post(path, json=turns | more | {"model": model})
                assert answer.status_code == 200, (path, answer.text)
                told[model] = read(answer.json())
            if path not in ("/v1/messages",):  # which has no seed
                assert told["x"] == told["fake:x"] != told["fake"], path
            missing = await http.post(path, json=turns | more | {"model": "fake:y"})
            assert missing.status_code == 404, (path, missing.text)
        answer = (await http.post("/v1/responses", json={"model": "x", "input": "hi", "max_output_tokens": 9})).json()
        assert answer["model"] == "x" and answer["status"] in ("completed", "incomplete")
        vectors = {}
        for model in ("fake", "x"):
            answer = (await http.post("/v1/embeddings", json={"model": model, "input": [PROMPT]})).json()
            assert answer["model"] == model
            raw = await cluster.stub.Embed(
                router_pb2.RouterEmbedRequest(
                    model=model, normalize=False, input=[router_pb2.EmbedInput(tokens=common_pb2.TokenIds(ids=PROMPT))]
                )
            )
            vectors[model] = raw.embeddings[0].values[0]
        assert vectors["fake"] != vectors["x"]


async def test_models_list_adapters_with_their_parent_and_unknown_names_are_not_found(tmp_path: Path) -> None:
    x = fake_lora(tmp_path / "x", "weights")
    async with fleet() as cluster:
        http = cluster.http
        told = (await http.post("/load_lora_adapter", json={"lora_name": "x", "lora_path": str(x)})).json()
        assert told == {"success": True, "loaded_adapters": {"x": str(x)}}
        models = {each["id"]: each["parent"] for each in (await http.get("/v1/models")).json()["data"]}
        assert models == {"fake": None, "x": "fake"}
        assert (await http.get("/v1/models/x")).json()["parent"] == "fake"
        assert (await http.get("/v1/models/y")).status_code == 404
        listed = (await cluster.stub.ListModels(router_pb2.ListModelsRequest())).models
        assert [(each.id, each.parent) for each in listed] == [("fake", ""), ("x", "fake")]
        for name in ("y", "fake:y", "nothing:x"):
            assert await refusal(cluster.ask(name)) == grpc.StatusCode.NOT_FOUND
        assert await refusal(cluster.ask(None, lora_name="y")) == grpc.StatusCode.NOT_FOUND
        assert await refusal(cluster.ask("x", lora_name="y")) == grpc.StatusCode.INVALID_ARGUMENT
        for path, body, status in (
            ("/v1/load_lora_adapter", {"lora_name": "z", "lora_path": str(tmp_path / "none")}, 400),
            ("/v1/load_lora_adapter", {"lora_name": "fake", "lora_path": str(x)}, 400),
            ("/v1/load_lora_adapter", {"lora_name": "a:b", "lora_path": str(x)}, 400),
            ("/v1/load_lora_adapter", {"lora_name": "z"}, 400),
            ("/v1/unload_lora_adapter", {"lora_name": "z"}, 404),
        ):
            assert (await http.post(path, json=body)).status_code == status, body
        assert [*await cluster.list()] == ["x"]
        gone = await http.post("/v1/unload_lora_adapter", json={"lora_name": "x"})
        assert gone.text == "Success: LoRA adapter 'x' removed successfully."
        assert await refusal(cluster.ask("x")) == grpc.StatusCode.NOT_FOUND
        assert await cluster.ask("fake") == expected(None)


async def test_a_lost_worker_s_adapters_are_elsewhere_before_requests_need_them(tmp_path: Path) -> None:
    paths = {f"a{n}": fake_lora(tmp_path / f"a{n}", f"weights {n}") for n in range(4)}
    async with fleet(3, flags=("--lora-slots", "8,rank=16")) as cluster:
        for name, path in paths.items():
            await cluster.stub.LoadLora(router_pb2.RouterLoadLoraRequest(name=name, path=str(path)))
            assert await cluster.ask(name) == expected(path)
        addresses = [worker.address for worker in cluster.workers]
        held = {name: set(each.workers) for name, each in (await cluster.list()).items()}
        assert all(1 <= len(workers) <= 3 for workers in held.values())
        lost = next(iter(held["a0"]))
        await cluster.workers[addresses.index(lost)].kill()
        answers = await asyncio.gather(*(cluster.ask(name) for name in paths))
        assert answers == [expected(path) for path in paths.values()], "not one request fails"
        left = [number for number, address in enumerate(addresses) if address != lost]
        began = time.monotonic()
        async with asyncio.timeout(60):
            while not all(
                [set(paths) <= {*await cluster.on_worker(number)} for number in left]
            ):  # two holders for each
                await asyncio.sleep(0.02)
        print(f"elsewhere {time.monotonic() - began:.2f} s after the answers")
        for name, each in (await cluster.list()).items():
            assert lost not in each.workers and lost not in each.chosen, name


async def test_what_one_router_loads_reloads_and_unloads_another_one_serves_as_it_is(tmp_path: Path) -> None:
    old, new = fake_lora(tmp_path / "old", "old weights"), fake_lora(tmp_path / "new", "new weights")
    async with fleet(2, routers=2) as cluster:
        first, second = cluster.stubs
        await first.LoadLora(router_pb2.RouterLoadLoraRequest(name="x", path=str(old)))

        async def other_knows(wanted: bool) -> None:
            async with asyncio.timeout(30):
                while bool((await second.ListLoras(router_pb2.RouterListLorasRequest())).loras) is not wanted:
                    await asyncio.sleep(0.02)

        await other_knows(True)
        assert await cluster.ask("x", stub=second) == expected(old)
        await first.LoadLora(router_pb2.RouterLoadLoraRequest(name="x", path=str(new)))
        for stub in (first, second, first, second):
            assert await cluster.ask("x", stub=stub) == expected(new), "whatever a router still believes"
        await second.UnloadLora(router_pb2.RouterUnloadLoraRequest(name="x"))
        await asyncio.sleep(1.0)  # several rounds of the first router's loads
        assert not await cluster.on_worker(0) and not await cluster.on_worker(1)
        await other_knows(False)
        for stub in (first, second):
            assert await refusal(cluster.ask("x", stub=stub)) == grpc.StatusCode.NOT_FOUND


async def test_routes_are_explained_as_they_are_chosen_and_hit_the_cache_of_the_adapter(tmp_path: Path) -> None:
    x = fake_lora(tmp_path / "x", "weights")
    async with fleet(3) as cluster:
        await cluster.stub.LoadLora(router_pb2.RouterLoadLoraRequest(name="x", path=str(x)))
        reasons = []
        for _ in range(4):
            request = router_pb2.RouterGenerateRequest(
                tokens=common_pb2.TokenIds(ids=PROMPT),
                model="x",
                sampling=common_pb2.SamplingParams(max_tokens=3, seed=7),
            )
            explained = await cluster.stub.ExplainRoute(router_pb2.ExplainRouteRequest(request=request))
            call = cluster.stub.Generate(request)
            [*_, last] = [part async for part in call]
            chosen = dict(await call.trailing_metadata())["x-sapwood-worker"]
            assert cluster.routers[0].worker_names.id_of(explained.chosen) == chosen
            told = {each.address: each for each in explained.candidates}
            # Routers know whole pages, of 16 tokens.
            assert told[explained.chosen].cached_tokens == last.usage.cached_tokens // 16 * 16
            reasons.append(explained.reason)
            await asyncio.sleep(0.1)
        assert "cache_hit" in reasons
        base = await cluster.stub.ExplainRoute(
            router_pb2.ExplainRouteRequest(
                request=router_pb2.RouterGenerateRequest(tokens=common_pb2.TokenIds(ids=PROMPT))
            )
        )
        assert all(each.cached_tokens == 0 for each in base.candidates), "the base's pages are others"


async def test_prompts_are_handed_over_with_their_adapter_and_never_to_other_weights(tmp_path: Path) -> None:
    x = fake_lora(tmp_path / "x", "weights")
    roles = (("--role", "prefill"), ("--role", "decode"))
    async with fleet(2, each=roles, disaggregate="always") as cluster:
        await cluster.stub.LoadLora(router_pb2.RouterLoadLoraRequest(name="x", path=str(x)))
        for _ in range(3):
            assert await cluster.ask("x", count=12) == expected(x, 12)
        assert {*await cluster.on_worker(0)} == {*await cluster.on_worker(1)} == {"x"}
        # The decode worker gets other bytes: it refuses to continue what the old ones began.
        fake_lora(x, "changed behind everybody's back")
        async with grpc.aio.insecure_channel(cluster.workers[1].address) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            version = (await cluster.on_worker(0))["x"].version
            await stub.UnloadLora(worker_pb2.UnloadLoraRequest(name="x"))
            await stub.LoadLora(worker_pb2.LoadLoraRequest(name="x", path=str(x)))
            assert (await cluster.on_worker(1))["x"].version > version
        with contextlib.suppress(grpc.aio.AioRpcError):
            assert await cluster.ask("x", count=12) == expected(x, 12)
        async with asyncio.timeout(60):
            while len({(await cluster.on_worker(number))["x"].digest for number in (0, 1)}) > 1:
                await asyncio.sleep(0.02)
        assert await cluster.ask("x", count=12) == expected(x, 12), "the latest version everywhere"


async def test_adapters_that_workers_resolve_are_served_and_unknown_ones_are_404(tmp_path: Path) -> None:
    x = fake_lora(tmp_path / "adapters" / "x", "weights")
    flags = ("--lora-slots", f"4,resolver=folder:{tmp_path / 'adapters'}")
    async with fleet(2, flags=flags) as cluster:
        assert await cluster.ask("fake:x") == await cluster.ask("x") == expected(x)
        for name in ("fake:y", "y"):
            assert await refusal(cluster.ask(name)) == grpc.StatusCode.NOT_FOUND


async def test_only_operators_load_adapters_where_they_have_a_port_of_their_own(tmp_path: Path) -> None:
    x = fake_lora(tmp_path / "x", "weights")
    async with fleet(1, admin_port=0) as cluster:
        for path in ("/v1/load_lora_adapter", "/load_lora_adapter", "/v1/unload_lora_adapter", "/unload_lora_adapter"):
            said = await cluster.http.post(path, json={"lora_name": "x", "lora_path": str(x)})
            assert said.status_code == 404, path
        load = router_pb2.RouterLoadLoraRequest(name="x", path=str(x))
        assert await refusal(cluster.stub.LoadLora(load)) == grpc.StatusCode.UNIMPLEMENTED
        assert (
            await refusal(cluster.stub.ListLoras(router_pb2.RouterListLorasRequest())) == grpc.StatusCode.UNIMPLEMENTED
        )
        async with grpc.aio.insecure_channel(f"127.0.0.1:{cluster.routers[0].admin_port}") as channel:
            await router_pb2_grpc.RouterStub(channel).LoadLora(load)
        assert await cluster.ask("x") == expected(x)


async def test_sessions_keep_the_adapter_that_answered(tmp_path: Path) -> None:
    x = fake_lora(tmp_path / "x", "weights")
    async with fleet(2) as cluster:
        await cluster.stub.LoadLora(router_pb2.RouterLoadLoraRequest(name="x", path=str(x)))
        opened = await cluster.stub.OpenSession(router_pb2.OpenSessionRequest())
        session = opened.session.id
        assert await cluster.ask("x", session=session) == expected(x)
        async with asyncio.timeout(30):
            while True:
                state = (await cluster.stub.GetSession(router_pb2.GetSessionRequest(id=session))).session
                if state.pinned_tokens:
                    break
                await asyncio.sleep(0.02)
        assert state.model == "x"
        assert await refusal(cluster.ask("fake", session=session)) == grpc.StatusCode.INVALID_ARGUMENT
        await cluster.ask("x", session=session)
        state = (await cluster.stub.GetSession(router_pb2.GetSessionRequest(id=session))).session
        assert state.cached_tokens > 0


async def test_the_command_line_loads_lists_and_unloads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = fake_lora(tmp_path / "x", "weights")
    async with fleet(1) as cluster:
        address = ("--address", f"127.0.0.1:{cluster.routers[0].grpc_port}")

        async def lora(*words: str) -> tuple[int, str]:
            code = await asyncio.to_thread(main, ["lora", *words, *address])
            return code, capsys.readouterr().out

        code, said = await lora("load", "x", str(x))
        assert code == 0 and f"x of fake is loaded on {cluster.workers[0].address}" in said
        assert await cluster.ask("x") == expected(x)
        code, said = await lora("list")
        assert code == 0 and fake_digest(x).hex()[:12] in said and str(x) in said
        code, said = await lora("list", "--json")
        assert json.loads(said)["name"] == "x" and json.loads(said)["digest"] == fake_digest(x).hex()
        assert (await lora("unload", "x"))[0] == 0
        assert (await lora("unload", "x"))[0] != 0
        assert (await lora("load", "y", str(tmp_path / "none")))[0] != 0
