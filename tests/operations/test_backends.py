"""Workers that answer HTTP behind a router of their own, all real processes, asked with OpenAI's client while they are lost."""

from __future__ import annotations

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from tokenizers import pre_tokenizers

from .conftest import Process

_LETTERS = [sorted(pre_tokenizers.ByteLevel.alphabet()).index(letter) for letter in "abcdefgh"]
_TEXT: dict[str, Any] = {
    "temperature": 0,
    "max_tokens": 400,
    # Letters alone, so that a text has one way to be tokenized.
    "extra_body": {"ignore_eos": True, "allowed_token_ids": _LETTERS},
}


def _kill_group(cluster: Any) -> None:
    """Ends a worker alone as a machine that loses its power does."""
    for name in ("sapwood_router", "sapwood_worker", "sapwood_tokenizer"):
        os.kill(cluster.service_pid(name), signal.SIGKILL)
    cluster.process.kill()


@pytest.mark.slow
def test_streams_go_on_at_another_worker_when_one_is_killed(start_cluster: Any) -> None:
    alone = ("--no-router", "--served-model-name", "tiny")
    with start_cluster(*alone) as first, start_cluster(*alone) as second:
        urls = [f"http://{cluster.http}" for cluster in (first, second)]
        flags = ("--port", "0", "--http-port", "0", "--policy", "round_robin", "--backend-interval", "1")
        router = Process("router", *flags, "--workers", *urls)
        try:
            http = "http://" + router.find(r"HTTP listening on (\S+)")
            with httpx.Client(base_url=http, timeout=120) as plain:
                while plain.get("/health").status_code != 200:
                    pass
                while (
                    len([row for row in plain.get("/ui/fleet").json()["router"]["workers"] if row["state"] == "up"]) < 2
                ):
                    pass
            with openai.OpenAI(base_url=f"{http}/v1", api_key="none", timeout=120, max_retries=0) as client:
                undisturbed = client.completions.create(model="tiny", prompt="ab", **_TEXT).choices[0].text
                streams = [client.completions.create(model="tiny", prompt="ab", stream=True, **_TEXT) for _ in range(2)]
                begun = [next(iter(stream)).choices[0].text for stream in streams]
                _kill_group(first)

                def rest(number: int) -> str:
                    return begun[number] + "".join(chunk.choices[0].text for chunk in streams[number])

                with ThreadPoolExecutor(2) as pool:
                    texts = list(pool.map(rest, range(2)))
                assert texts == [undisturbed] * 2
                few = _TEXT | {"max_tokens": 4}
                whole = [client.completions.create(model="tiny", prompt="ab", **few) for _ in range(4)]
                assert {answer.choices[0].text for answer in whole} == {undisturbed[:4]}
            page = httpx.get(f"{http}/metrics", timeout=120).text
            assert 'sapwood_router_requests_total{code="OK",model="tiny"} 7.0' in page
            assert re.search(r"^sapwood_router_resumptions_total 1\.0$", page, re.MULTILINE), page
        finally:
            assert router.stop() == 0
