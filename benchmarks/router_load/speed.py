"""CPU time a request and latency.

Ours is measured without tokenization, as its peers are: prompts and answers are token ids, and the tokenizer is not visited.
Next to it, with it: ids in and text out, and text both ways. Latencies are shown next to those of a worker asked directly: by
the same clients over HTTP and over gRPC, and over its session, as ours asks it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import uvloop
from report import Figure, Goal
from router_load.engines import OURS, Router, Times, Workers, cpu_seconds, is_ours, running
from router_load.load import Result, grpc_load, http_load, http_request, percentile, session_load
from router_load.mock_tokenizer import encode

_CHUNKS = 32
_ROUNDS = 3
_TEXT_OUT, _TEXT = "(text out)", "(text)"
_DIRECT, _DIRECT_GRPC, _DIRECT_SESSION = "direct", "direct (gRPC)", "direct (session)"
_GRPC, _GRPC_TEXT_OUT = "(gRPC)", "(gRPC, text out)"


@dataclass(frozen=True)
class _Kind:
    name: str
    stream: bool
    pace_ms: float
    count: int


_KINDS = (
    _Kind("unary", stream=False, pace_ms=0, count=3000),
    _Kind("stream back to back", stream=True, pace_ms=0, count=2000),
    _Kind("stream paced 5 ms", stream=True, pace_ms=5, count=1500),
)


def _text(number: int) -> str:
    """A short prompt, different for each number."""
    return f"{number:08d} What is the capital of France, and why is it that one?"


Load = Callable[[Router, int, int], Coroutine[Any, Any, Result]]


def _http(kind: _Kind, *, ids_in: bool = False, ids_out: bool = False) -> Load:
    """Prompts and answers as token ids, which only ours takes, or as text."""
    tokens = _CHUNKS if kind.stream else 1
    options = {"detokenize": False} if ids_out else {}

    def make(number: int) -> bytes:
        prompt = encode(_text(number)).tolist() if ids_in else _text(number)
        return http_request({"prompt": prompt, "max_tokens": tokens, "stream": kind.stream, **options})

    return lambda router, concurrency, count: http_load(
        router.http_port, make, tokens, kind.stream, concurrency=concurrency, count=count, as_ids=ids_out
    )


def _grpc(kind: _Kind, *, ids_out: bool) -> Load:
    tokens = _CHUNKS if kind.stream else 1

    def make(number: int) -> list[int]:
        return encode(_text(number)).tolist()

    return lambda router, concurrency, count: grpc_load(
        router.grpc_port, make, tokens, concurrency=concurrency, count=count, as_ids=ids_out
    )


def _worker_grpc(kind: _Kind) -> Load:
    """Straight to the worker, with the same client as :func:`_grpc`: the "router" is one."""
    tokens = _CHUNKS if kind.stream else 1
    return lambda router, concurrency, count: grpc_load(
        router.grpc_port,
        lambda number: encode(_text(number)).tolist(),
        tokens,
        concurrency=concurrency,
        count=count,
        worker=True,
    )


def _session(kind: _Kind) -> Load:
    """Straight to the worker: the "router" is one."""
    tokens = _CHUNKS if kind.stream else 1
    return lambda router, concurrency, count: session_load(
        router.grpc_port, lambda number: encode(_text(number)).tolist(), tokens, count=count
    )


def measure(engines: list[str], folder: Path, scale: float) -> tuple[list[Figure], list[Goal]]:
    """Interleaved: each round measures every router once; figures are medians over rounds."""
    cpu: dict[tuple[str, str], list[float]] = {}
    p50: dict[tuple[str, str], list[float]] = {}
    figures: list[Figure] = []
    for kind in _KINDS:
        with Workers(Times(pace_ms=kind.pace_ms), folder) as workers:
            routers: list[Router] = []
            stacks = [running(engine, workers, folder, policy="round_robin") for engine in engines]
            try:
                routers = [stack.__enter__() for stack in stacks]
                _measure_kind(kind, routers, workers, scale, cpu, p50, figures)
            finally:
                for stack in stacks[: len(routers)]:
                    stack.__exit__(None, None, None)
    return figures, _goals(cpu, p50)


def _measure_kind(
    kind: _Kind,
    routers: list[Router],
    workers: Workers,
    scale: float,
    cpu: dict[tuple[str, str], list[float]],
    p50: dict[tuple[str, str], list[float]],
    figures: list[Figure],
) -> None:
    loads: list[tuple[str, Router, Load]] = []
    for router in routers:
        name, ours = router.engine, is_ours(router.engine)
        loads.append((name, router, _http(kind, ids_in=ours, ids_out=ours)))
        if ours:
            loads.append((f"{name} {_TEXT_OUT}", router, _http(kind, ids_in=True)))
            loads.append((f"{name} {_TEXT}", router, _http(kind)))
            loads.append((f"{name} {_GRPC}", router, _grpc(kind, ids_out=True)))
            loads.append((f"{name} {_GRPC_TEXT_OUT}", router, _grpc(kind, ids_out=False)))
    loads.sort(key=lambda load: load[0].removeprefix(load[1].engine))  # those of ours take turns
    direct = Router("direct", workers.processes[0], workers.http_ports[0], workers.grpc_ports[0])
    count = max(64, int(kind.count * scale))
    rates: dict[str, list[float]] = {}
    ninety_nine: dict[str, list[float]] = {}
    for number in range(_ROUNDS + 1):  # the first warms up
        for name, router, load in loads:
            router.rest()
            before = cpu_seconds(router.process.pid)
            result = _run(load(router, 64, count if number else count // 5))
            router.rest()
            spent = cpu_seconds(router.process.pid) - before
            assert result.failed == 0, f"{name}: {result.statuses}, {result.broken} broken"
            if number:
                cpu.setdefault((kind.name, name), []).append(spent / count * 1000)
                rates.setdefault(name, []).append(count / result.seconds)
        if not number:
            continue
        if kind.pace_ms:
            continue
        straight = [(_DIRECT, _http(kind)), (_DIRECT_GRPC, _worker_grpc(kind)), (_DIRECT_SESSION, _session(kind))]
        for name, router, load in [*((name, direct, load) for name, load in straight), *loads]:
            result = _run(load(router, 1, max(20, int(300 * scale))))
            p50.setdefault((kind.name, name), []).append(percentile(result.latencies, 0.5) * 1000)
            ninety_nine.setdefault(name, []).append(percentile(result.latencies, 0.99) * 1000)
    for name, rate in rates.items():
        figures.append(Figure(f"{kind.name}: CPU a 1000 requests", median(cpu[kind.name, name]), "s", name))
        figures.append(Figure(f"{kind.name}: requests/s at 64", median(rate), "1/s", name))
    for name, worst in ninety_nine.items():
        figures.append(Figure(f"{kind.name}: p50 at 1", median(p50[kind.name, name]), "ms", name))
        figures.append(Figure(f"{kind.name}: p99 at 1", median(worst), "ms", name))


def _run(work: Coroutine[Any, Any, Result]) -> Result:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def _goals(cpu: dict[tuple[str, str], list[float]], p50: dict[tuple[str, str], list[float]]) -> list[Goal]:
    goals = []
    for kind, engine, most in (
        ("unary", OURS, 2.0),
        ("stream back to back", OURS, 1.0),
        ("stream paced 5 ms", OURS, 1.0),
        ("stream back to back", f"{OURS} {_GRPC}", 2.0),
        ("stream paced 5 ms", f"{OURS} {_GRPC}", 2.0),
    ):
        if (kind, "smg") in cpu:
            ratio = median(cpu[kind, engine]) / median(cpu[kind, "smg"])
            goals.append(Goal(f"{kind}: CPU of {engine} to smg's", ratio, most=most))
    # The same client to the router, and to a worker.
    for engine, straight in ((OURS, _DIRECT), (f"{OURS} {_GRPC}", _DIRECT_GRPC)):
        added = median(p50["unary", engine]) - median(p50["unary", straight])
        goals.append(Goal(f"added p50 at concurrency 1, {engine}, ms", added, most=1.0))
    for kind, engine in [key for key in cpu if "/" in key[1]]:
        mine = OURS + engine[len(engine.partition(" ")[0]) :]
        for what, table in (("CPU", cpu), ("p50", p50)):
            if (kind, engine) in table:
                ratio = median(table[kind, mine]) / median(table[kind, engine])
                goals.append(Goal(f"{kind}: {what} of {mine} to that beside", ratio, most=1.05))
    return goals
