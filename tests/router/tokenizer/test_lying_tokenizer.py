"""Whatever a tokenizer answers, a request ends in an answer or an error that says whose fault it is, and the next is served."""

import asyncio
import contextlib
import json
import logging

import pytest

from sapwood_router.app import RouterApplication
from sapwood_router.config import RouterConfig
from sapwood_testing.router.fake_worker import FakeWorker
from sapwood_testing.router.lying_tokenizer import LIES, LyingTokenizer
from tests.router.conftest import Cluster

SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
HI = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
REQUESTS = [
    ("/v1/completions", {"prompt": "abc", "max_tokens": 4, "stop": "z", "logprobs": 1}),
    ("/v1/completions", {"prompt": ["abc", "de"], "max_tokens": 4, "bad_words": ["x"], "stream": True}),
    ("/v1/chat/completions", {"messages": HI, "max_tokens": 4, "response_format": SCHEMA}),
    ("/v1/chat/completions", {"messages": HI, "max_tokens": 4, "tools": TOOLS, "tool_choice": "required"}),
    ("/v1/chat/completions", {"messages": HI, "max_tokens": 4, "stream": True}),
    ("/v1/messages", {"messages": HI, "max_tokens": 4}),
    ("/v1/messages/count_tokens", {"messages": HI}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 16}),
    ("/v1/embeddings", {"input": ["abc", "de"]}),
    ("/tokenize", {"prompt": "abc", "return_token_strs": True}),
    ("/detokenize", {"tokens": [70, 71]}),
    ("/score", {"text_1": "a", "text_2": "b"}),
    ("/generate", {"text": "abc", "sampling_params": {"max_new_tokens": 4}}),
    ("/api/show", {"model": "fake"}),
]


@contextlib.asynccontextmanager
async def lying_cluster():
    tokenizer, worker = LyingTokenizer(), FakeWorker()
    for service in (tokenizer, worker):
        await service.start()
    router = RouterApplication(
        RouterConfig(
            port=0, http_port=0, workers=(worker.address,), tokenizer=tokenizer.address, health_interval=0.1,
            heartbeat_ms=10, worker_silence=30, tokenizer_grace=1, request_timeout=3,
        ),
        make_parser=tokenizer.make_parser,
    )  # fmt: skip
    await router.start()
    cluster = Cluster(tokenizer, [worker], router)
    cluster.answer_with("an answer")
    try:
        await cluster.ready()
        yield cluster
    finally:
        await cluster.close()


def fault_of(status: int, path: str, text: str) -> str:
    """What is wrong with an answer; "" if nothing is."""
    if status == 200:
        return ""
    said = json.loads(text)
    error = said.get("error", said)
    message = error if isinstance(error, str) else error.get("message", "")
    if len(text) > 20_000:
        return f"{path}: an error of {len(text)} bytes: {text[:200]}"
    if status in (400, 413, 422, 429, 503, 504) or "tokenizer" in message or "a service" in message:
        return ""
    return f"{path}: {status} {message}"


@pytest.mark.parametrize("what", LIES)
async def test_a_tokenizers_lie_is_its_own_fault_and_the_next_request_is_served(what, caplog) -> None:
    caplog.set_level(logging.WARNING)
    async with lying_cluster() as cluster:
        for how in LIES[what]:
            cluster.tokenizer.lie = what, how
            cluster.router._tokenizers.of(None).client._vocabulary = None
            cluster.ask_tokenizer_again()
            caplog.clear()
            answers = await asyncio.gather(*(cluster.http.post(path, json=body) for path, body in REQUESTS))
            for (path, _), answer in zip(REQUESTS, answers, strict=True):
                assert not (fault := fault_of(answer.status_code, path, answer.text)), f"{how}: {fault}"
            unforeseen = [record for record in caplog.records if record.exc_info]
            assert not unforeseen, f"{how}: {unforeseen[0].getMessage()} {unforeseen[0].exc_info}"
            assert all(len(record.getMessage()) < 20_000 for record in caplog.records), how
            cluster.tokenizer.lie = "", ""
            cluster.router._tokenizers.of(None).client._vocabulary = None
            cluster.ask_tokenizer_again()
            for _ in range(20):
                good = await cluster.http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 4})
                if good.status_code == 200:
                    break
                await asyncio.sleep(0.1)
            assert good.status_code == 200, f"{how}: {good.text}"
