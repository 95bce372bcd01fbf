"""What trainers call, on a router over real workers whose runner needs no model: by slime's, verl's, AReaL's and vLLM's names."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest

from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.tenants.api_keys import hash_key
from sapwood_router.app import RouterApplication
from sapwood_router.config import RouterConfig
from sapwood_testing.router.fake_tokenizer import FakeTokenizer
from sapwood_testing.worker.fake_runner import continuation, fake_weights
from sapwood_testing.worker.fake_worker_process import FakeWorkerProcess

VOCAB = 259
PROMPT = [10, 20, 30, 40] * 6
OPERATOR = {"authorization": "Bearer trainer-key"}
CLIENT = {"authorization": "Bearer client-key"}


def expected(count: int, content: bytes = b"") -> list[int]:
    digest = fake_weights(content) if content else b""
    return list(islice(continuation(PROMPT, SamplingParams(seed=1), VOCAB, digest), count))


@pytest.fixture(scope="module")
def workers() -> Any:
    running = [FakeWorkerProcess("--vocab-size", str(VOCAB), step_ms=2) for _ in range(2)]
    yield running
    for each in running:
        each.process.kill()
        each.process.wait()


@contextlib.asynccontextmanager
async def running_router(workers: list[FakeWorkerProcess], folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    keys = folder / "keys"
    keys.write_text(f"trainer {hash_key('trainer-key')} operator\nclient {hash_key('client-key')}\n")
    keys.chmod(0o600)
    tokenizer = FakeTokenizer()
    await tokenizer.start()
    settings: dict[str, Any] = {"api_keys": keys, "worker_silence": 30, "tokenizer_grace": 60}
    addresses = tuple(each.address for each in workers)
    config = RouterConfig(port=0, http_port=0, workers=addresses, tokenizer=tokenizer.address, **settings)
    router = RouterApplication(config, make_parser=tokenizer.make_parser)
    await router.start()
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{router.http_port}", timeout=60) as http:
            async with asyncio.timeout(60):
                while len((await http.get("/workers", headers=OPERATOR)).json().get("workers", [])) < len(workers):
                    await asyncio.sleep(0.05)
            yield http
    finally:
        await router.stop()
        await tokenizer.kill()


@pytest.fixture
async def http(workers: list[FakeWorkerProcess], tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with running_router(workers, tmp_path) as client:
        client.headers.update(OPERATOR)
        yield client
        await client.post("/resume_memory_occupation", json={})
        await client.post("/continue_generation", json={})


async def generate(http: httpx.AsyncClient, count: int = 5, **more: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": count, "sampling_seed": 1, "ignore_eos": True}
    answer = await http.post("/generate", json={"input_ids": PROMPT, "sampling_params": sampling, **more})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def weights(folder: Path, content: bytes) -> str:
    path = folder / f"{content.decode()}.safetensors"
    path.write_bytes(content)
    return str(path)


async def test_slime_lists_workers_and_updates_each_by_its_url(http: httpx.AsyncClient, tmp_path: Path) -> None:
    listed = (await http.get("/workers")).json()["workers"]
    assert len(listed) == 2 and all(each["url"].startswith("http://127.0.0.1") for each in listed)
    for each in listed:
        assert (await http.get(f"{each['url']}/health")).status_code == 200
        assert (await http.post(f"{each['url']}/pause_generation", json={})).status_code == 200
        flushed = await http.get(f"{each['url']}/flush_cache")
        assert flushed.status_code == 200
        body = {
            "model_path": weights(tmp_path, b"seven"),
            "load_format": "auto",
            "weight_version": "7",
            "flush_cache": True,
        }
        answer = (await http.post(f"{each['url']}/update_weights_from_disk", json=body)).json()
        assert answer["success"] is True and answer["num_paused_requests"] == 0
        assert (await http.get(f"{each['url']}/get_weight_version")).json() == {"weight_version": "7"}
        assert (await http.post(f"{each['url']}/continue_generation", json={})).status_code == 200
    answer = await generate(http)
    assert answer["output_ids"] == expected(5, b"seven") and answer["meta_info"]["weight_version"] == "7"
    again = [await generate(http) for _ in range(3)]  # one of two workers has the prompt twice
    assert any(each["meta_info"]["cached_tokens"] > 0 for each in again)


async def test_a_refused_update_changes_no_worker(http: httpx.AsyncClient, tmp_path: Path) -> None:
    await http.post("/update_weights_from_disk", json={"model_path": weights(tmp_path, b"good"), "weight_version": "g"})
    answer = await http.post("/update_weights_from_disk", json={"model_path": weights(tmp_path, b"bad")})
    assert answer.status_code == 400 and answer.json()["success"] is False and "tensor bad" in answer.json()["message"]
    assert (await http.get("/get_weight_version")).json() == {"weight_version": "g"}
    assert (await generate(http))["output_ids"] == expected(5, b"good")


async def test_verl_aborts_updates_and_continues_partial_rollouts(http: httpx.AsyncClient, tmp_path: Path) -> None:
    await http.post("/update_weights_from_disk", json={"model_path": weights(tmp_path, b"old"), "weight_version": "1"})
    asked = asyncio.ensure_future(generate(http, 3000, return_logprob=True))
    async with asyncio.timeout(60):
        while not sum(each["num_reqs"] for each in (await http.get("/v1/loads?include=core")).json()["loads"]):
            await asyncio.sleep(0.02)
    assert (await http.post("/flush_cache")).status_code == 400, "not while requests run"
    paused = (await http.post("/pause_generation", json={"mode": "abort"})).json()
    assert paused["aborted"] == 1
    part = await asked
    assert part["meta_info"]["finish_reason"]["type"] == "abort" and part["meta_info"]["weight_version"] == "1"
    tokens = part["output_ids"]
    assert tokens == expected(len(tokens), b"old") and len(tokens) < 3000
    assert [each[1] for each in part["meta_info"]["output_token_logprobs"]] == tokens
    assert (await http.post("/flush_cache")).status_code == 200
    await http.post("/update_weights_from_disk", json={"model_path": weights(tmp_path, b"new"), "weight_version": "2"})
    waiting = asyncio.ensure_future(generate(http))
    await asyncio.sleep(0.1)
    assert not waiting.done(), "new requests wait while generation is paused"
    await http.post("/continue_generation", json={})
    assert (await waiting)["output_ids"] == expected(5, b"new")


async def test_requests_in_flight_tell_each_tokens_weights(http: httpx.AsyncClient, tmp_path: Path) -> None:
    await http.post("/update_weights_from_disk", json={"model_path": weights(tmp_path, b"a"), "weight_version": "a"})
    asked = asyncio.ensure_future(generate(http, 600))
    async with asyncio.timeout(60):
        while not sum(each["num_running_reqs"] for each in (await http.get("/v1/loads")).json()["loads"]):
            await asyncio.sleep(0.02)
    await http.post("/update_weights_from_disk", json={"model_path": weights(tmp_path, b"b"), "weight_version": "b"})
    answer = await asked
    (first, old), (at, new) = answer["meta_info"]["weight_versions"]
    assert (first, old, new) == (0, "a", "b") and answer["meta_info"]["weight_version"] == "b"
    tokens = answer["output_ids"]
    assert len(tokens) == 600 and tokens[:at] == expected(at, b"a")
    rest = islice(continuation(PROMPT + tokens[:at], SamplingParams(seed=1), VOCAB, fake_weights(b"b")), 600 - at)
    assert tokens[at:] == list(rest)


async def test_memory_sleeps_in_stages_and_routers_choose_no_sleeper(http: httpx.AsyncClient) -> None:
    before = await generate(http)
    one, other = (each["url"] for each in (await http.get("/workers")).json()["workers"])
    assert (await http.post(f"{one}/release_memory_occupation", json={"tags": ["kv_cache"]})).status_code == 200
    assert (await http.get(f"{one}/is_sleeping")).json() == {"is_sleeping": True}
    assert (await http.get(f"{other}/is_sleeping")).json() == {"is_sleeping": False}
    for _ in range(6):
        assert (await generate(http))["output_ids"] == before["output_ids"]
    assert [each["is_healthy"] for each in (await http.get("/workers")).json()["workers"]].count(False) == 1
    assert (await http.post(f"{one}/resume_memory_occupation", json={})).status_code == 200
    assert (await http.post("/release_memory_occupation", json={"tags": ["nothing"]})).status_code == 400
    assert (await http.post("/sleep?level=1")).status_code == 200
    assert (await http.get("/is_sleeping")).json() == {"is_sleeping": True}
    assert (await http.post("/wake_up?tags=weights")).status_code == 200
    assert (await http.get("/is_sleeping")).json() == {"is_sleeping": True}
    assert (await http.post("/wake_up")).status_code == 200
    assert (await generate(http))["output_ids"] == before["output_ids"]


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
async def test_vllms_pause_and_resume(http: httpx.AsyncClient, mode: str) -> None:
    asked = asyncio.ensure_future(generate(http, 300))
    async with asyncio.timeout(60):
        while not sum(each["num_running_reqs"] for each in (await http.get("/v1/loads")).json()["loads"]):
            await asyncio.sleep(0.02)
    answer = await http.post(f"/pause?mode={mode}&clear_cache=true")
    assert answer.status_code == 200 and answer.json()["aborted"] == (1 if mode == "abort" else 0)
    if mode == "keep":
        await asyncio.sleep(0.1)
        assert not asked.done()
    assert (await http.post("/resume")).status_code == 200
    found = await asked
    assert (len(found["output_ids"]) == 300) == (mode != "abort")


async def test_a_pause_whose_caller_leaves_before_requests_end_is_undone(http: httpx.AsyncClient) -> None:
    before = (await generate(http))["output_ids"]
    asked = asyncio.ensure_future(generate(http, 1500))
    async with asyncio.timeout(60):
        while not sum(each["num_running_reqs"] for each in (await http.get("/v1/loads")).json()["loads"]):
            await asyncio.sleep(0.02)
    with pytest.raises(httpx.ReadTimeout):
        await http.post("/pause?mode=wait", timeout=httpx.Timeout(60, read=0.3))
    async with asyncio.timeout(30):
        assert (await generate(http))["output_ids"] == before
    assert not asked.done(), "the requests that were waited for are not over"
    assert len((await asked)["output_ids"]) == 1500


@pytest.mark.parametrize("headers", [CLIENT, {"authorization": ""}])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/update_weights_from_disk"),
        ("POST", "/pause_generation"),
        ("POST", "/flush_cache"),
        ("POST", "/sleep"),
        ("GET", "/workers"),
        ("GET", "/workers/w-1/flush_cache"),
        ("GET", "/v1/loads"),
    ],
)
async def test_calls_of_trainers_are_for_operators_keys(
    http: httpx.AsyncClient, headers: dict[str, str], method: str, path: str
) -> None:
    json = {"model_path": "/x"} if method == "POST" else None
    answer = await http.request(method, path, headers=headers, json=json)
    assert answer.status_code == (403 if headers is CLIENT else 401), answer.text


async def test_what_is_not_done_is_refused_with_what_to_do_instead(http: httpx.AsyncClient) -> None:
    answer = await http.post("/update_weights_from_tensor", json={"serialized_named_tensors": ["gASV"]})
    assert answer.status_code == 501 and "/dev/shm" in answer.text
    group = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "group_name": "g"}
    answer = await http.post("/init_weights_update_group", json={**group, "backend": "gloo"})
    assert answer.status_code == 400 and "URLs of /workers" in answer.json()["message"]
    one = (await http.get("/workers")).json()["workers"][0]["url"]
    answer = await http.post(f"{one}/init_weights_update_group", json=group)
    assert answer.status_code == 501 and "joins no group" in answer.text
    body = {"names": ["a"], "dtypes": ["bfloat16"], "shapes": [[1]], "group_name": "g"}
    answer = await http.post("/update_weights_from_distributed", json={**body, "load_format": "flattened_bucket"})
    assert answer.status_code == 400 and "load_format" in answer.json()["message"]
    answer = await http.post("/update_weights_from_distributed", json={**body, "shapes": []})
    assert answer.status_code == 400 and "equally many" in answer.json()["message"]
    assert (await http.post("/destroy_weights_update_group", json={"group_name": "g"})).json()["success"] is True
    assert (await http.post("/workers/w-none/flush_cache")).status_code == 404
    answer = await http.post("/pause_generation", json={"mode": "later"})
    assert answer.status_code == 400 and "in_place" in answer.json()["message"]
