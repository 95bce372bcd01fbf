"""Each program under examples/programs gives on the demo model what the same calls by hand give, and draws its picture."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

import sapwood.lang as sl
from sapwood.client import Client

PROGRAMS = Path(__file__).resolve().parents[2] / "examples/programs"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", PROGRAMS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class ByHand:
    """The calls that a program spares one."""

    def __init__(self, cluster: Any, client: Client) -> None:
        self._url = f"http://{cluster.http}"
        self._client = client

    def ask(self, prompt: str, **options: Any) -> str:
        return self._client.generate(prompt, **{"temperature": 0, **options}).text()

    def tokens(self, text: str) -> list[int]:
        body = json.dumps({"prompt": text}).encode()
        with urlopen(Request(f"{self._url}/tokenize", body, {"content-type": "application/json"})) as answer:
            return list(json.load(answer)["tokens"])

    def mean_logprob(self, prompt: str, choice: str) -> float:
        """Of the tokens of a choice after a prompt."""
        head, whole = self.tokens(prompt), self.tokens(prompt + choice)
        start = next((i for i, pair in enumerate(zip(head, whole, strict=False)) if pair[0] != pair[1]), len(head))
        asked = {"token_ids": whole, "prompt_logprobs": 0, "max_tokens": 1, "temperature": 0}
        found = self._client.generate(**asked).answer().prompt_logprobs[start - 1 :]
        return sum(each.logprob for each in found) / len(found)

    def choose(self, prompt: str, choices: list[str]) -> str:
        scores = [self.mean_logprob(prompt, choice) for choice in choices]
        return choices[scores.index(max(scores))]


@pytest.fixture
def by_hand(cluster: Any) -> Iterator[ByHand]:
    with Client(cluster.grpc) as client:
        yield ByHand(cluster, client)


@pytest.fixture
def backend(cluster: Any) -> sl.Backend:
    return sl.Sapwood(cluster.grpc)


def test_few_shot_gives_what_the_calls_by_hand_give(backend: Any, by_hand: Any) -> None:
    example = load("few_shot")
    begin = "".join(f"The capital of {known}: {city}\n" for known, city in example.EXAMPLES)
    for country, state in zip(example.QUESTIONS, example.run(backend), strict=True):
        assert state["city"] == by_hand.ask(f"{begin}The capital of {country}:", max_tokens=5, stop="\n")


@pytest.mark.slow
def test_a_tree_of_thought_gives_what_the_calls_by_hand_give(backend: Any, by_hand: Any) -> None:
    example = load("tree_of_thought")
    text, steps = example.TASK, []
    for level in range(2):
        found = []
        for idea in range(3):
            prompt = f"{text}Step {level + 1}, idea {idea + 1}:"
            step = by_hand.ask(prompt, max_tokens=8, stop="\n")
            found.append((by_hand.mean_logprob(f"{prompt}{step}\nThis idea is", " good"), -idea, step))
        steps.append(max(found)[2])
        text += f"Step {level + 1}:{steps[-1]}\n"
    state = example.run(backend)
    assert (state.returned, state.text()) == (steps, text)


@pytest.mark.slow
def test_self_consistency_gives_what_the_calls_by_hand_give(backend: Any, by_hand: Any) -> None:
    example = load("self_consistency")
    deltas = list(
        by_hand._client.generate(example.QUESTION, max_tokens=3, n=5, temperature=0.7, seed=7, stop="\n", whole=True)
    )
    answers = [delta.text for delta in sorted(deltas, key=lambda delta: delta.index)]
    state = example.run(backend)
    assert state["answers"] == answers
    assert state.returned == Counter(answer.strip() for answer in answers).most_common(1)[0][0]
    assert state.timeline().requests == 1


@pytest.mark.slow
def test_json_extraction_gives_what_the_calls_by_hand_give(backend: Any, by_hand: Any) -> None:
    example = load("json_extraction")
    found = example.run(backend).value("person")
    assert found == json.loads(by_hand.ask(f"{example.TEXT}As JSON: ", max_tokens=48, json_schema=example.SCHEMA))
    assert sorted(found) == ["born", "name"]


@pytest.mark.slow
def test_react_with_tools_gives_what_the_calls_by_hand_give(backend: Any, by_hand: Any) -> None:
    example = load("react")
    text = f"{example.EXAMPLE}Question: Where does Linus live?\n"
    returned = None
    for _ in range(3):
        action = by_hand.choose(f"{text}Action:", [" Search", " Finish"])
        text += f"Action:{action} ["
        asked = by_hand.ask(text, max_tokens=6, stop=["]", "\n"])
        text += f"{asked}]\n"
        if action == " Finish":
            returned = asked
            break
        text += f"Observation: {example.search(asked)}\n"
    state = example.run(backend)
    assert (state.text(), state.returned) == (text, returned)


@pytest.mark.slow
def test_questions_on_a_long_document_give_what_the_calls_by_hand_give(backend: Any, by_hand: Any) -> None:
    example = load("document_qa")
    state = example.run(backend)
    assert state.returned == [
        by_hand.ask(f"{example.DOCUMENT}Answer: {question}", max_tokens=4, stop=[".", "\n"])
        for question in example.QUESTIONS
    ]
    asked = [event.usage for event in state.record.events if event.node.startswith("gen")]
    assert all(usage.prompt_tokens - usage.cached_tokens < 40 for usage in asked), "the document is computed once"


@pytest.mark.slow
def test_a_judge_gives_what_the_calls_by_hand_give(backend: Any, by_hand: Any) -> None:
    example = load("judge")
    ahead = []
    for first, second in (example.ANSWERS, example.ANSWERS[::-1]):
        prompt = (
            f"Question: {example.QUESTION}\nFirst answer: {first}\nSecond answer: {second}\nThe better answer is the"
        )
        scores = [by_hand.mean_logprob(prompt, verdict) for verdict in example.VERDICTS]
        ahead.append(scores[0] - scores[1])
    assert example.run(backend).returned == pytest.approx(ahead[0] - ahead[1], abs=0.05)


@pytest.mark.slow
def test_a_search_over_rows_gives_what_the_calls_by_hand_give(backend: Any, by_hand: Any, tmp_path: Path) -> None:
    example = load("search_rows")
    assert len(example.ROWS) == 1000
    states = example.run(backend, rows=20, journal=tmp_path / "journal")
    assert len((tmp_path / "journal").read_text().splitlines()) == 21
    for row, state in zip(example.ROWS[:6], states, strict=False):
        prompt = f"{example.TASK}{row['row']}:"
        assert state["kind"] == by_hand.ask(prompt, max_tokens=2, regex=" (plant|fish)")


def test_every_example_prints_what_it_found_and_saves_a_picture_of_its_run(cluster: Any, tmp_path: Path) -> None:
    assert len(list(PROGRAMS.glob("*.py"))) == 8
    page = tmp_path / "run.html"
    command = [sys.executable, str(PROGRAMS / "few_shot.py"), str(page)]
    environment = {**os.environ, "SAPWOOD_ROUTER": cluster.grpc}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^Germany: \w+", done.stdout) and f"picture: {page}" in done.stdout
    assert "gen(&#x27;city&#x27;)" in page.read_text()
    for source in PROGRAMS.glob("*.py"):
        assert ".timeline().save(" in source.read_text() and "def run(backend: sl.Backend" in source.read_text()
