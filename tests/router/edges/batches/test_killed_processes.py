"""A batch over routers and workers that are killed: processes of their own, and a store that outlives them."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import openai
import pytest

from sapwood_testing.ports import port_of_its_own
from sapwood_testing.router.fake_tokenizer import FakeTokenizer
from sapwood_testing.router.worker_process import WorkerProcess

OPEN = ("validating", "in_progress", "finalizing")


class Router:
    """A router process that can be killed and started again on its port."""

    def __init__(self, *flags: str) -> None:
        self._port = port_of_its_own()
        self._flags = flags
        self.client = openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{self._port}/v1",
            api_key="none",
            max_retries=8,
            http_client=httpx.AsyncClient(timeout=120, trust_env=False),
        )

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "sapwood_router", "--port", "0", "--http-port", str(self._port),
            "--worker-silence", "5", "--tokenizer-grace", "60", "--queue-size", "wait=300", *self._flags,
            stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()

    async def status(self, batch_id: str) -> tuple[str, int]:
        """A batch's state, and how many lines are answered."""
        while True:
            try:
                batch = await self.client.batches.retrieve(batch_id)
            except openai.APIConnectionError:  # it starts
                await asyncio.sleep(0.1)
                continue
            return batch.status, batch.request_counts.completed


@pytest.fixture
async def tokenizer() -> AsyncIterator[FakeTokenizer]:
    fake = FakeTokenizer()
    await fake.start()
    yield fake
    await fake.kill()


async def run(tokenizer: FakeTokenizer, tmp_path: Path, lines: int, length: int) -> None:
    workers = [WorkerProcess(), WorkerProcess()]
    for worker in workers:
        await worker.start()
    store, addresses = f"sqlite:{tmp_path}/store.sqlite", [worker.address for worker in workers]
    flags = ("--tokenizer", tokenizer.address, "--workers", *addresses, "--store", store, "--batches", "32")
    routers = [Router(*flags), Router(*flags)]
    try:
        for router in routers:
            await router.start()
        one, other = routers
        content = b"".join(
            json.dumps(
                {
                    "custom_id": f"line-{number}",
                    "method": "POST",
                    "url": "/v1/completions",
                    "body": {"prompt": f"say {number}", "max_tokens": length, "seed": number},
                }
            ).encode()
            + b"\n"
            for number in range(lines)
        )
        while True:
            try:
                file = await one.client.files.create(file=("in.jsonl", content), purpose="batch")
                break
            except openai.APIConnectionError:
                await asyncio.sleep(0.1)
        batch = await one.client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )

        async def until(share: float) -> None:
            while True:
                status, completed = await other.status(batch.id)
                if completed >= share * lines or status not in OPEN:
                    return
                await asyncio.sleep(0.1)

        victims = [one.process, workers[0], workers[1], other.process]
        for number, victim in enumerate(victims):
            await until((number + 1) / (len(victims) + 2))
            if victim is one.process:
                await one.kill()
                await one.start()
            elif victim is other.process:
                await other.kill()
                await other.start()
            else:
                await victim.kill()
                await victim.start()
        await until(2.0)
        ended = await other.client.batches.retrieve(batch.id)
        assert (ended.status, ended.error_file_id) == ("completed", None), ended
        text = (await other.client.files.content(ended.output_file_id)).text
        results = [json.loads(line) for line in text.splitlines()]
        assert [result["custom_id"] for result in results] == [f"line-{number}" for number in range(lines)]
        assert {result["response"]["status_code"] for result in results} == {200}
        assert ended.request_counts.completed == lines
    finally:
        for router in routers:
            await router.client.close()
            await router.kill()
        for worker in workers:
            await worker.kill()


@pytest.mark.slow
async def test_no_line_is_lost_or_doubled_where_each_process_is_killed_once(tokenizer, tmp_path) -> None:
    await run(tokenizer, tmp_path, lines=2000, length=4)


@pytest.mark.slow
@pytest.mark.timeout(3000)
async def test_of_50000_lines_none_is_lost_or_doubled_where_each_process_is_killed_once(tokenizer, tmp_path) -> None:
    await run(tokenizer, tmp_path, lines=50_000, length=2)
