"""Batches by OpenAI's client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest


def jsonl(*lines: object) -> bytes:
    return b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)


def line(number: int, endpoint: str = "/v1/completions", **body: object) -> dict:
    body = body or {"model": "fake", "prompt": f"say {number}", "max_tokens": 50}
    return {"custom_id": f"line-{number}", "method": "POST", "url": endpoint, "body": body}


@pytest.fixture
def begin() -> Callable:
    """Uploads lines and begins a batch of them."""

    async def run(client, *lines: object, endpoint: str = "/v1/completions", window: str = "24h"):
        file = await client.files.create(file=("in.jsonl", jsonl(*lines)), purpose="batch")
        return await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window=window)

    return run


@pytest.fixture
def ended() -> Callable:
    """Waits for a batch's end; gives it, and the results in its files, by ``custom_id``."""

    async def wait(client, batch_id: str, seconds: float = 120):
        async with asyncio.timeout(seconds):
            while (batch := await client.batches.retrieve(batch_id)).status in (
                "validating", "in_progress", "finalizing", "cancelling",
            ):  # fmt: skip
                await asyncio.sleep(0.05)
        files = []
        for file_id in (batch.output_file_id, batch.error_file_id):
            text = "" if file_id is None else (await client.files.content(file_id)).text
            found = [json.loads(each) for each in text.splitlines()]
            assert len({each["custom_id"] for each in found}) == len(found), "no line is there twice"
            files.append({each["custom_id"]: each for each in found})
        return batch, *files

    return wait
