"""Prefill and decode workers of `sapwood up` on the demo model answer the APIs as the same workers do when each does all."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from sapwood.cli.main import main
from sapwood.client import Client

pytestmark = [pytest.mark.slow, pytest.mark.model]

PROMPT = "Rivers rise in mountains, run through valleys and plains, and end in the sea. The longest of them are the Nile, the"
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city, as a sentence",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
COLOUR = {
    "type": "json_schema",
    "json_schema": {
        "name": "colour",
        "schema": {
            "type": "object",
            "properties": {"colour": {"enum": ["red", "green", "blue"]}, "warm": {"type": "boolean"}},
            "required": ["colour", "warm"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
def pairs(demo_model: Any, start_cluster_of: Any) -> Iterator[Any]:
    flags = ["demo-base", "--served-model-name", "demo", "--threads", "1", "--router-disaggregate", "always"]
    flags += ["--roles", "prefill,prefill,decode,decode"]
    flags += [
        "--worker-step-ms",
        "0",
    ]  # the long prompt is one step, however slow the machine: its pages are read layer by layer
    with start_cluster_of(*flags) as cluster:
        yield cluster


def chat(client: openai.OpenAI, question: str, **settings: Any) -> Any:
    messages: Any = [{"role": "user", "content": question}]
    return client.chat.completions.create(model="demo", messages=messages, **settings)


def answers(client: openai.OpenAI, round_: int) -> dict[str, Any]:
    """One of each kind. ``round_`` begins every prompt, so that nothing of it is cached from another round."""
    greedy = client.completions.create(model="demo", prompt=f"{round_}. {PROMPT}", max_tokens=24, temperature=0)
    seeded = client.completions.create(
        model="demo", prompt=f"{round_}. {PROMPT}", max_tokens=16, temperature=0.8, seed=11, n=3
    )
    stream = client.completions.create(
        model="demo", prompt=f"{round_}: {PROMPT}", max_tokens=16, temperature=0, stream=True
    )
    long = client.completions.create(
        model="demo", prompt=f"{round_}! " + f"{PROMPT} " * 40, max_tokens=16, temperature=0
    )
    likely = client.completions.create(
        model="demo", prompt=f"{round_}; {PROMPT}", max_tokens=8, temperature=0, logprobs=2
    ).choices[0]
    named = chat(
        client,
        f"{round_}. How is the weather in Rome today, and should I take an umbrella with me?",
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        max_tokens=60,
        temperature=0,
    )
    call = named.choices[0].message.tool_calls[0].function
    schema = chat(
        client,
        f"{round_}. Which colour does the sky have at noon in summer, and is that a warm colour?",
        response_format=COLOUR,
        max_tokens=60,
        temperature=0,
    )
    return {
        "greedy": greedy.choices[0].text,
        "long": long.choices[0].text,
        "seeded, n=3": [choice.text for choice in seeded.choices],
        "streamed": "".join(chunk.choices[0].text for chunk in stream),
        "tokens": likely.logprobs.tokens,
        "logprobs": likely.logprobs.token_logprobs,
        "tool": (call.name, json.loads(call.arguments)),
        "schema": json.loads(schema.choices[0].message.content),
    }


def counted(cluster: Any, name: str) -> float:
    """A counter, summed over the workers."""
    total = 0.0
    pages = {found[1] for line in cluster.lines if (found := re.search(r"worker-\d.* metrics at (\S+)", line))}
    assert len(pages) == len(cluster.workers)
    for url in pages:
        with urllib.request.urlopen(url, timeout=60) as page:
            found = re.search(rf"^sapwood_worker_{name} (\S+)$", page.read().decode(), re.MULTILINE)
        assert found is not None, name
        total += float(found[1])
    return total


def set_roles(cluster: Any, *roles: str) -> None:
    """Changes what the workers are for, and waits until the router knows."""
    for address, role in zip(cluster.workers, roles, strict=True):
        assert main(["worker", "role", role, "--worker", address]) == 0
        assert main(["worker", "flush", "--worker", address]) == 0
    with Client(cluster.grpc) as router:
        while {worker.address: worker.role for worker in router.list_workers()} != dict(
            zip(cluster.workers, roles, strict=True)
        ):
            time.sleep(0.05)


def test_what_pairs_answer_is_what_one_worker_answers(pairs: Any, capsys: pytest.CaptureFixture[str]) -> None:
    web = httpx.Client(trust_env=False, timeout=300)
    with openai.OpenAI(base_url=f"http://{pairs.http}/v1", api_key="none", max_retries=0, http_client=web) as client:
        handed_over = answers(client, 1)
        pulled = counted(pairs, "kv_transfer_pages_total")
        assert pulled > 0
        assert counted(pairs, "kv_transfer_part_bytes_total") > 0  # of the long prompt, layer by layer
        tickets = counted(pairs, "kv_transfers_offered_total")
        assert tickets >= 8  # each prompt, and each of the three continuations
        set_roles(pairs, "both", "both", "both", "both")
        whole = answers(client, 1)
        assert counted(pairs, "kv_transfers_offered_total") == tickets
    logprobs = handed_over.pop("logprobs"), whole.pop("logprobs")
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-3)
    assert handed_over == whole
    assert whole["tool"] == ("weather", {"city": whole["tool"][1]["city"]})
    assert whole["schema"]["colour"] in ("red", "green", "blue")
    assert len(set(whole["seeded, n=3"])) > 1
    print(capsys.readouterr().out, f"{pulled:.0f} pages pulled for {tickets:.0f} tickets", handed_over)
