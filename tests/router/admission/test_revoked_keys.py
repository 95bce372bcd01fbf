"""A key that is revoked: what runs with it ends, at the workers too, and what runs with others continues."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from sapwood.v1 import router_pb2
from sapwood_common.tenants.api_keys import hash_key, make_key

BODY = {"prompt": [3, 4], "max_tokens": 50}


@pytest.mark.parametrize("how", ["line", "file"])
async def test_running_streams_end_over_http_and_grpc(
    make_cluster: Any, wait_until: Any, tmp_path: Path, how: str
) -> None:
    revoked, kept = make_key(), make_key()
    path = tmp_path / "keys"
    path.write_text(f"alice {hash_key(revoked)}\nalice {hash_key(kept)}\n")
    async with make_cluster(1, api_keys=path, heartbeat_ms=1000) as cluster:
        [worker] = cluster.workers
        gate = worker.script.gate = asyncio.Event()
        worker.script.gate_after = 1

        async def stream(key: str) -> list[str]:
            headers = {"authorization": f"Bearer {key}"}
            async with cluster.http.stream(
                "POST", "/v1/completions", json=BODY | {"stream": True}, headers=headers
            ) as answer:
                assert answer.status_code == 200
                return [line async for line in answer.aiter_lines() if line]

        async def whole() -> int:
            headers = {"authorization": f"Bearer {revoked}"}
            return int((await cluster.http.post("/v1/completions", json=BODY, headers=headers)).status_code)

        ending, staying = asyncio.ensure_future(stream(revoked)), asyncio.ensure_future(stream(kept))
        in_one_piece = asyncio.ensure_future(whole())
        metadata = (("authorization", f"Bearer {revoked}"),)
        call = cluster.stub.Generate(router_pb2.RouterGenerateRequest(text="a"), metadata=metadata)
        assert (await call.read()).token_ids
        await wait_until(lambda: len(worker.calls) == 4)
        if how == "file":
            staying.cancel()
            path.unlink()
        else:
            path.write_text(f"alice {hash_key(kept)}\n")
        lines = await asyncio.wait_for(ending, 60)
        assert "the API key was revoked" in lines[-1]
        assert "authentication_error" in lines[-1]
        assert await asyncio.wait_for(in_one_piece, 60) == 401
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await asyncio.wait_for(call.read(), 60) is not grpc.aio.EOF:
                pass
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        await wait_until(lambda: sum(each.outcome != "running" for each in worker.calls) >= 3)
        gate.set()
        if how == "line":
            assert (await asyncio.wait_for(staying, 60))[-1] == "data: [DONE]"


async def test_a_response_that_nobody_waits_for_ends(make_cluster: Any, wait_until: Any, tmp_path: Path) -> None:
    revoked, kept = make_key(), make_key()
    path = tmp_path / "keys"
    path.write_text(f"alice {hash_key(revoked)}\nalice {hash_key(kept)}\n")
    async with make_cluster(1, api_keys=path) as cluster:
        [worker] = cluster.workers
        worker.script.gate = asyncio.Event()
        worker.script.gate_after = 1
        url, body = "/v1/responses", {"input": "hello", "background": True}
        begun = await cluster.http.post(url, json=body, headers={"authorization": f"Bearer {revoked}"})
        await wait_until(lambda: len(worker.calls) == 1)
        path.write_text(f"alice {hash_key(kept)}\n")
        await wait_until(lambda: worker.calls[0].outcome != "running")
        found = await cluster.http.get(f"{url}/{begun.json()['id']}", headers={"authorization": f"Bearer {kept}"})
        assert (found.json()["status"], found.json()["error"]["message"]) == ("failed", "the API key was revoked")
