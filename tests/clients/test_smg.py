"""smg, a gateway made for SGLang, as its users install it, routes to two of our workers."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from sapwood.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from sapwood_common.models.model_files import packaged_path

pytestmark = [pytest.mark.slow, pytest.mark.clients, pytest.mark.model, pytest.mark.timeout(1200)]

GATEWAY = "smg==1.13.0"
PROMPT = "<bos>The three primary colours are"  # the gateway adds no token to completions
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model's tokenizer in the files that gateways read."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    read = AutoTokenizer.from_pretrained(
        str(packaged_path("demo-base").parent), gguf_file=packaged_path("demo-base").name
    )
    read.chat_template = TEMPLATE
    read.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def workers(tokenizer: Path) -> Iterator[list[str]]:
    """Addresses of two workers."""
    flags = ("--port", "0", "--kv-cache-gb", "0.2", "--threads", "1", "--sglang", "--sglang-tokenizer", tokenizer)
    running = [
        subprocess.Popen([sys.executable, "-m", "sapwood_worker", *map(str, flags)], stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    addresses = []
    for each in running:
        assert each.stderr is not None
        found = next(filter(None, (re.search(r"\] listening on ([\w.:]+)", line) for line in each.stderr)))
        addresses.append(found.group(1))
    yield addresses
    for each in running:
        each.kill()
        each.communicate()


@pytest.fixture(scope="module")
def gateway(
    workers: list[str], make_environment: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    program = make_environment(GATEWAY) / "smg"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    log = tmp_path_factory.mktemp("smg") / "log"
    urls = [f"grpc://{address}" for address in workers]
    flags = ("--host", "127.0.0.1", "--port", port, "--policy", "round_robin", "--worker-urls", *urls)
    with log.open("w") as out:
        running = subprocess.Popen([program, "launch", *map(str, flags)], stdout=out, stderr=subprocess.STDOUT)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300, trust_env=False) as client:
            while not _answers(client):
                assert running.poll() is None, log.read_text()[-3000:]
                time.sleep(0.5)
            yield client
    finally:
        running.kill()
        running.wait()


def _answers(client: httpx.Client) -> bool:
    """Whether it listens, has found the workers and has read their tokenizer."""
    try:
        return client.post("/v1/completions", json=completion(max_tokens=1)).status_code == 200
    except httpx.TransportError:
        return False


def completion(**given: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": PROMPT, "max_tokens": 8, "temperature": 0} | given


def stub(address: str) -> Any:
    return worker_pb2_grpc.WorkerStub(grpc.insecure_channel(address))


@pytest.fixture(scope="module")
def text(workers: list[str], tokenizer: Path) -> str:
    """What a worker itself continues with."""
    from transformers import AutoTokenizer

    read = AutoTokenizer.from_pretrained(tokenizer)
    ids = read.encode(PROMPT, add_special_tokens=False)
    settings = common_pb2.SamplingParams(temperature=0, max_tokens=8)
    request = worker_pb2.WorkerGenerateRequest(request_id="own", token_ids=ids, sampling=settings)
    tokens = [token for response in stub(workers[0]).Generate(request) for token in response.token_ids]
    return str(read.decode(tokens, skip_special_tokens=True))


def test_a_completion_has_the_workers_text_whole_and_streamed(gateway: httpx.Client, text: str) -> None:
    whole = gateway.post("/v1/completions", json=completion()).json()
    assert whole["choices"][0]["text"] == text
    assert whole["usage"]["completion_tokens"] == 8
    streamed = gateway.post("/v1/completions", json=completion(stream=True)).text
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events if event["choices"]) == text


def test_both_workers_are_given_work(gateway: httpx.Client, workers: list[str]) -> None:
    for _ in range(4):
        gateway.post("/v1/completions", json=completion()).raise_for_status()
    loads = [next(stub(each).WatchLoad(worker_pb2.WatchLoadRequest(interval_ms=0))).load for each in workers]
    assert all(load.prompt_tokens > 0 for load in loads)


def test_a_chat_answers_by_a_schema(gateway: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"age": {"enum": [7, 8]}}, "required": ["age"]}
    answer = gateway.post(
        "/v1/chat/completions",
        json={
            "model": "demo",
            "messages": [{"role": "user", "content": "How old is she?"}],
            "max_tokens": 40,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": 2,
            "response_format": {"type": "json_schema", "json_schema": {"name": "age", "schema": schema}},
        },
    ).json()
    (choice,) = answer["choices"]
    assert json.loads(choice["message"]["content"])["age"] in (7, 8)
    assert all(len(each["top_logprobs"]) == 2 for each in choice["logprobs"]["content"])


def test_text_ends_before_a_string_to_stop_at(gateway: httpx.Client, text: str) -> None:
    stop = text.split()[1]
    cut = gateway.post("/v1/completions", json=completion(stop=[stop])).json()["choices"][0]
    assert cut["text"] == text[: text.index(stop)]
    assert cut["finish_reason"] == "stop"


def test_what_the_worker_refuses_is_the_clients_error(gateway: httpx.Client) -> None:
    refused = gateway.post("/v1/completions", json=completion(prompt="word " * 40000))
    assert 400 <= refused.status_code < 500, refused.text
