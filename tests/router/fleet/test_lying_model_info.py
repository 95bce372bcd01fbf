"""Whatever a worker says of its model, the router stays up, shows it in bounds, and serves with another worker."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from sapwood.v1 import common_pb2, worker_pb2
from sapwood_router.app import RouterApplication
from sapwood_router.config import RouterConfig
from sapwood_testing.router.fake_tokenizer import FakeTokenizer
from sapwood_testing.router.fake_worker import FakeWorker
from tests.router.conftest import Cluster

LARGEST, NASTY = 2**32 - 1, "\x1b[31m\nFORGED line\r\x00\u202e" + "x" * 100_000
LIES: dict[str, dict[str, Any]] = {
    "nasty names": {"model": NASTY, "architecture": NASTY, "dtype": NASTY, "attention_reason": NASTY, "weights": NASTY},
    "another's model": {"model": "fake", "context_length": 1, "vocab_size": 1, "page_size": 1, "num_pages": 1},
    "nothing": {"context_length": 0, "vocab_size": 0, "page_size": 0, "num_pages": 0, "epoch": 0, "max_running": 0},
    "the largest": {
        "context_length": LARGEST,
        "vocab_size": LARGEST,
        "page_size": LARGEST,
        "num_pages": LARGEST,
        "epoch": 2**64 - 1,
        "max_running": LARGEST,
        "embedding_size": LARGEST,
        "max_step_tokens": LARGEST,
        "tensor_parallel": LARGEST,
        "attention_ranks": LARGEST,
        "embedded_tokens": LARGEST,
    },
    "many": {
        "eos_token_ids": [LARGEST] * 100_000,
        "labels": ["a"] * 100_000,
        "logit_processors": [NASTY] * 9,
        "embedding_dimensions": [LARGEST] * 100_000,
    },
    "enums": {"role": 77, "pooling": 77, "activation": 77},
    "fingerprint": {"page_fingerprint": b"x" * 1_000_000},
    "defaults": {
        "sampling_defaults": common_pb2.SamplingParams(
            temperature=float("nan"), top_p=-1, top_k=-7, repetition_penalty=float("inf")
        )
    },
    "no model": {"model": ""},
}


class LyingWorker(FakeWorker):
    """Says of its model what it is given to say."""

    lie: dict[str, Any] = {}  # noqa: RUF012 - each test sets its own

    async def GetModelInfo(  # noqa: N802
        self, request: worker_pb2.GetModelInfoRequest, context: Any
    ) -> worker_pb2.GetModelInfoResponse:
        answer = await super().GetModelInfo(request, context)
        for name, value in self.lie.items():
            answer.ClearField(name)
            answer.MergeFrom(worker_pb2.GetModelInfoResponse(**{name: value}))
        return answer


@pytest.mark.parametrize("lie", LIES)
async def test_what_a_worker_says_of_its_model_harms_no_other(lie: str, caplog, wait_until) -> None:
    caplog.set_level(logging.INFO)
    tokenizer, good, lying = FakeTokenizer(), FakeWorker(), LyingWorker("lies")
    lying.lie = LIES[lie]
    for service in (tokenizer, good, lying):
        await service.start()
    addresses = (good.address, lying.address)
    config = RouterConfig(
        port=0, http_port=0, workers=addresses, tokenizer=tokenizer.address, health_interval=0.1, heartbeat_ms=10,
        worker_silence=30, request_timeout=20, status_page="on", policy="round_robin",
    )  # fmt: skip
    router = RouterApplication(config, make_parser=tokenizer.make_parser)
    await router.start()
    cluster = Cluster(tokenizer, [good, lying], router)
    try:
        await wait_until(lambda: router.problem() is None)
        await asyncio.sleep(0.3)
        for _ in range(4):
            for path, body in (
                ("/v1/completions", {"prompt": "abc", "max_tokens": 4}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}),
            ):
                answer = await cluster.http.post(path, json={"model": "fake", **body})
                assert answer.status_code == 200, answer.text[:300]
        names = [model["id"] for model in (await cluster.http.get("/v1/models")).json()["data"]]
        assert "fake" in names
        for name in names:  # nobody's request of the liar ends in an error of the router's own
            for path, body in (
                ("/v1/completions", {"prompt": "abc", "max_tokens": 4}),
                ("/v1/embeddings", {"input": "a"}),
            ):
                answer = await cluster.http.post(path, json={"model": name, **body})
                assert "the router's log" not in answer.text
        for path in ("/metrics", "/status", "/health", "/v1/models", "/server_info", "/ui/fleet"):
            shown = await cluster.http.get(path)
            assert shown.status_code in (200, 503), (path, shown.text[:300])
            assert len(shown.content) < 1_000_000, path
            if "json" in shown.headers["content-type"]:
                json.loads(shown.text)
        metrics = (await cluster.http.get("/metrics")).text
        assert not any(
            line.startswith("FORGED") or "\x1b" in line or len(line) > 2_000 for line in metrics.splitlines()
        )
        records = [record for record in caplog.records if record.name.startswith("sapwood_router")]
        assert not [record for record in caplog.records if record.exc_info and record.levelno >= logging.ERROR]
        assert records
    finally:
        await cluster.close()
