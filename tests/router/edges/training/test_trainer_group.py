"""Trainers' calls in their order, to a router over a worker with a tiny model; the trainer broadcasts in a group that it
leads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from sapwood_common.tenants.api_keys import hash_key
from sapwood_router.app import RouterApplication
from sapwood_router.config import RouterConfig
from sapwood_testing.models.other_weights import other_weights
from sapwood_testing.models.tiny_models import make_tiny
from sapwood_testing.ports import port_of_its_own
from sapwood_testing.router.fake_tokenizer import FakeTokenizer
from sapwood_testing.worker.trainer_group import lead_group
from sapwood_testing.worker.worker_process import started_worker

PROMPT = [5, 6, 7, 8, 9]


@asynccontextmanager
async def served(model: Path, tmp_path: Path) -> AsyncIterator[tuple[httpx.AsyncClient, str]]:
    """A client with an operator's key, and the URL of the one worker."""
    keys = tmp_path / "keys"
    keys.write_text(f"trainer {hash_key('key')} operator\n")
    keys.chmod(0o600)
    tokenizer = FakeTokenizer()
    await tokenizer.start()
    with started_worker(model, tmp_path / "log", "--threads", "1", "--num-pages", "64") as worker:
        settings: dict[str, Any] = {"api_keys": keys, "worker_silence": 30, "tokenizer_grace": 60}
        config = RouterConfig(port=0, http_port=0, workers=(worker.address,), tokenizer=tokenizer.address, **settings)
        router = RouterApplication(config, make_parser=tokenizer.make_parser)
        await router.start()
        headers = {"authorization": "Bearer key"}
        base = f"http://127.0.0.1:{router.http_port}"
        async with httpx.AsyncClient(base_url=base, timeout=60, headers=headers) as http:
            async with asyncio.timeout(60):
                while not (workers := (await http.get("/workers")).json().get("workers")):
                    await asyncio.sleep(0.05)
            yield http, workers[0]["url"]
        await router.stop()
    await tokenizer.kill()


@pytest.mark.slow
async def test_slimes_calls_give_the_engine_the_trainers_weights(tmp_path: Path) -> None:
    tiny = make_tiny("llama", tmp_path / "model")
    async with served(tiny.path, tmp_path) as (http, engine):
        await _train(http, engine, tiny.path)


@pytest.mark.slow
async def test_vllms_calls_exchange_the_parts_of_an_update_at_once(tmp_path: Path) -> None:
    tiny = make_tiny("llama", tmp_path / "model")
    async with served(tiny.path, tmp_path) as (http, engine):
        before = await _rollout(http)
        assert (await http.get("/get_world_size")).json() == {"world_size": 1}
        port = port_of_its_own()
        info = {
            "master_address": "127.0.0.1",
            "master_port": port,
            "rank_offset": 1,
            "world_size": 2,
            "backend": "gloo",
        }
        made, answer = await asyncio.gather(
            asyncio.to_thread(lead_group, port, 2, "vllm"),
            http.post("/init_weight_transfer_engine", json={"init_info": info}),
        )
        assert answer.status_code == 200, answer.text
        assert (await http.post("/finish_weight_update")).json()["message"] == "no update has begun"
        assert (await http.post("/start_weight_update", json={"is_checkpoint_format": True})).status_code == 200
        nothing = (await http.post("/finish_weight_update")).json()
        assert nothing["message"] == "no tensor was given"
        assert (await http.post("/start_weight_update")).status_code == 200
        new = sorted(other_weights(tiny.path, 1).items())
        for part in (new[::2], new[1::2]):
            update = {
                "names": [name for name, _ in part],
                "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in part],
                "shapes": [list(tensor.shape) for _, tensor in part],
                "packed": False,
            }

            def broadcast(part: list[tuple[str, torch.Tensor]] = part) -> None:
                for _, tensor in part:
                    torch.distributed.broadcast(tensor, src=0, group=made)

            _, answer = await asyncio.gather(
                asyncio.to_thread(broadcast), http.post("/update_weights", json={"update_info": update})
            )
            assert answer.status_code == 200, answer.text
            assert (await _rollout(http))["output_ids"] == before["output_ids"], "a part was used before the end"
        assert (await http.post("/finish_weight_update")).status_code == 200
        after = await _rollout(http)
        assert after["output_ids"] == _greedy(tiny.path, dict(new), len(after["output_ids"]))
        packed = {"update_info": {**update, "packed": True}}
        refused = await http.post("/update_weights", json=packed)
        assert (refused.status_code, refused.json()["success"]) == (400, False)
        await http.post(f"{engine}/destroy_weights_update_group", json={"group_name": "vllm"})
        torch.distributed.destroy_process_group(made)


async def _train(http: httpx.AsyncClient, engine: str, start: Path) -> None:
    before = await _rollout(http)
    assert before["meta_info"]["weight_version"] == "default"
    port = port_of_its_own()
    group = {
        "master_address": "127.0.0.1",
        "master_port": port,
        "rank_offset": 1,
        "world_size": 2,
        "group_name": "slime-pp_0",
        "backend": "gloo",
    }
    made, answer = await asyncio.gather(
        asyncio.to_thread(lead_group, port, 2, "slime-pp_0"),
        http.post(f"{engine}/init_weights_update_group", json=group),
    )
    assert answer.json()["success"] is True, answer.text
    assert (await http.post(f"{engine}/pause_generation", json={"mode": "retract"})).status_code == 200
    assert (await http.get(f"{engine}/flush_cache")).status_code == 200
    new = sorted(other_weights(start, 1).items())
    for at, part in enumerate((new[::2], new[1::2])):
        body = {
            "names": [name for name, _ in part],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in part],
            "shapes": [list(tensor.shape) for _, tensor in part],
            "group_name": "slime-pp_0",
            "flush_cache": False,
            "weight_version": "1" if at else "half",
        }

        def broadcast(part: list[tuple[str, torch.Tensor]] = part) -> None:
            for _, tensor in part:
                torch.distributed.broadcast(tensor, src=0, group=made)

        _, answer = await asyncio.gather(
            asyncio.to_thread(broadcast), http.post(f"{engine}/update_weights_from_distributed", json=body)
        )
        assert answer.json()["success"] is True, answer.text
    assert (await http.get(f"{engine}/get_weight_version")).json() == {"weight_version": "1"}
    assert (await http.post(f"{engine}/continue_generation", json={})).status_code == 200
    after = await _rollout(http)
    assert after["meta_info"]["weight_version"] == "1" and after["output_ids"] != before["output_ids"]
    assert after["output_ids"] == _greedy(start, dict(new), len(after["output_ids"]))
    answer = await http.post(f"{engine}/destroy_weights_update_group", json={"group_name": "slime-pp_0"})
    assert answer.json()["success"] is True
    torch.distributed.destroy_process_group(made)


def _greedy(start: Path, weights: dict[str, torch.Tensor], count: int) -> list[int]:
    """What transformers says with these weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    model.load_state_dict(weights)
    tokens = list(PROMPT)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


async def _rollout(http: httpx.AsyncClient) -> dict[str, Any]:
    sampling = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    answer = await http.post(
        "/generate", json={"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
    )
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found
