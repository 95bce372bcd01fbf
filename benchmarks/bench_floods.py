"""Other clients of the router while strangers flood it, and the same floods compared with grpcio's server.

    make bench-floods                                            everything, an hour and a half
    make bench-floods ARGS='--floods PING,combined --no-peer'    these alone, and a whole table of them, of our router alone
    python benchmarks/bench_floods.py --no-peer --missed OLD.jsonl --json NEW.jsonl    what missed the aim in an earlier run
    taskset -c 2,3 python benchmarks/bench_floods.py --part 2/8 --json out-2.jsonl
    python benchmarks/bench_floods.py --render out-*.jsonl

For each flood, on one attacking connection and on ten, without TLS and with it: the p99 of other clients (health over gRPC; with
a key, completions over gRPC and HTTP; each on new connections and on kept ones) just before and during the flood, the server's
resident memory before, at most, and after, and what became of the attacker, who comes again at once wherever he is closed.
A router with two mock workers (``router_load/mock_worker.py``) is attacked, each flood a process of its own, over loopback, which
is all the network it needs. A case takes twice ``--seconds`` and 3 s more; a server's start some seconds.

A goal is met if each kind's p99 is at most 3 times the calm one and 20 ms, and memory at most 100 MB above the calm one and back.
Prints a line of JSON for each, then a table in Markdown for docs/design/figures-floods.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from floods.attacker import Fate
from floods.flood import Flood
from floods.neighbour import neighbour
from floods.outcome import Outcome, read_outcomes
from floods.table import render
from floods.tables import FLOODS, TABLES
from floods.targets import GRPCIO, OURS, Target, grpcio_server, router
from report import cpu_name
from router_load.engines import cpu_seconds, resident_mb
from router_load.load import percentile

_HERE = Path(__file__).resolve().parent
_LEAST_REST, _MOST_REST = 0.5, 20.0
"""Seconds between the end of a flood and the look at the memory after it."""
_SLACK_MB = 50.0
"""Above the memory of before, from which on it is back."""

TARGETS: dict[str, Callable[[Path, bool], AbstractContextManager[Target]]] = {OURS: router, GRPCIO: grpcio_server}


class Others:
    """The process of other clients."""

    def __init__(self, target: Target) -> None:
        command = [sys.executable, "-m", "floods.others", "--grpc-port", str(target.grpc_port)]
        command += ["--http-port", str(target.http_port), f"--key={target.key}"] + ["--tls"] * target.tls
        self._process = subprocess.Popen(command, cwd=_HERE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def measure(self, seconds: float) -> tuple[dict[str, float], dict[str, int]]:
        """p99 by kind, and what failed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(seconds, file=self._process.stdin, flush=True)
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return {kind: percentile(each, 0.99) for kind, each in found["latencies"].items()}, found["failed"]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class MemoryWatch:
    """The most memory that a process has while this is entered, in MB."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._over = threading.Event()
        self.most = 0.0

    def _look(self) -> None:
        while not self._over.wait(0.05):
            self.most = max(self.most, resident_mb(self._pid))

    def __enter__(self) -> MemoryWatch:
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def _flood(target: Target, others: Others, flood: Flood, connections: int, seconds: float) -> Outcome:
    pid = target.process.pid
    others.measure(0.5)  # new paths are warm
    calm, before_failed = others.measure(seconds)
    before, spent, began = resident_mb(pid), cpu_seconds(pid), time.monotonic()
    ports = {"grpc": target.grpc_port, "http": target.http_port}
    command = [sys.executable, "-m", "floods.attacker", flood.name] + ["--tls"] * target.tls
    command += ["--connections", str(connections), "--seconds", str(seconds + 1)]
    command += [f"--key={target.attackers_key}"] if flood.keyed and target.attackers_key else []
    with MemoryWatch(pid) as memory, contextlib.ExitStack() as stack:
        port = ports[flood.front] if flood.front in ports else stack.enter_context(neighbour())
        attacker = subprocess.Popen([*command, "--port", str(port)], cwd=_HERE, stdout=subprocess.PIPE, text=True)
        time.sleep(1)  # it starts, and has its first burst behind it
        flooded, failed = others.measure(seconds)
        assert attacker.stdout is not None
        said = attacker.stdout.read()
        attacker.wait()
    cores = (cpu_seconds(pid) - spent) / (time.monotonic() - began)
    after = _memory_after(pid, before)
    failed = {**failed, **{f"before the flood: {problem}": count for problem, count in before_failed.items()}}
    fate = Fate(**json.loads(said))
    return Outcome(
        flood.name, target.name, connections, target.tls, calm, flooded, failed, before, memory.most, after, cores, fate
    )


def _memory_after(pid: int, before: float) -> float:
    """Once it is back, or it has had its time."""
    time.sleep(_LEAST_REST)
    until = time.monotonic() + _MOST_REST
    while (now := resident_mb(pid)) > before + _SLACK_MB and time.monotonic() < until:
        time.sleep(0.25)
    return now


@contextmanager
def _attacked(
    make: Callable[[Path, bool], AbstractContextManager[Target]], tls: bool
) -> Iterator[tuple[Target, Others]]:
    with tempfile.TemporaryDirectory(prefix="bench-floods-") as folder, make(Path(folder), tls) as target:
        others = Others(target)
        try:
            yield target, others
        finally:
            others.close()


def _describe(outcome: Outcome) -> str:
    kind, share = outcome.worst
    where = f"{outcome.server}, {outcome.connections}{', TLS' if outcome.tls else ''}"
    verdict = "" if outcome.met else f", MISSED {share:.1f} {outcome.failed or ''}"
    return (
        f"{outcome.flood} ({where}): {kind} {1000 * outcome.calm[kind]:.0f} -> {1000 * outcome.flooded[kind]:.0f} ms, "
        f"+{outcome.grown:.0f} MB, {outcome.cores:.2f} cores{verdict}"
    )


def _flood_all(
    name: str, tls: bool, cases: list[tuple[Flood, int]], seconds: float, write: Callable[[Outcome], None]
) -> None:
    """Floods one server in each way; one that a flood has ended is started again."""
    while cases:
        with _attacked(TARGETS[name], tls) as (target, others):
            while cases and target.process.handle.poll() is None:
                flood, connections = cases.pop(0)
                if flood.front != "http" or target.http_port:
                    write(_flood(target, others, flood, connections, seconds))


def _choose(names: str | None, part: str) -> list[Flood]:
    """Those named, by their own names or their tables', or all; of these every Nth for a part ``I/N``."""
    known = {flood.name: flood for flood in FLOODS}
    chosen = list(known.values())
    if names is not None:
        chosen = [flood for name in names.split(",") for flood in TABLES.get(name.strip()) or (known[name.strip()],)]
    number, _, of = part.partition("/")
    return chosen[int(number) - 1 :: int(of)]


def _missed(files: list[Path]) -> set[tuple[str, int, bool]]:
    """The cases of our server that missed the aim: flood, connections, and whether over TLS."""
    outcomes = (outcome for outcome in read_outcomes(files) if outcome.server == OURS)
    return {(outcome.flood, outcome.connections, outcome.tls) for outcome in outcomes if not outcome.met}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--floods",
        help=f"which, with commas between; {', '.join(TABLES)} stand for all of their files; all unless given",
        metavar="A,B",
    )
    parser.add_argument(
        "--missed",
        nargs="+",
        type=Path,
        help="only the cases that missed the aim in these files' lines",
        metavar="FILE",
    )
    parser.add_argument("--part", default="1/1", help="every Nth of them, from the Ith on", metavar="I/N")
    parser.add_argument("--list", action="store_true", help="print their names, and that is all")
    parser.add_argument("--connections", nargs="*", type=int, default=[1, 10])
    parser.add_argument("--tls", choices=["both", "yes", "no"], default="both")
    servers = parser.add_mutually_exclusive_group()
    servers.add_argument("--no-peer", action="store_true", help="ours alone")
    servers.add_argument("--peer-only", action="store_true", help="grpcio's alone")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each flood, and of the calm before it")
    parser.add_argument("--json", type=Path, help="append the lines to this file, too")
    parser.add_argument(
        "--render", nargs="+", type=Path, metavar="FILE", help="print the table of these files' lines, and that is all"
    )
    args = parser.parse_args()
    chosen = _choose(args.floods, args.part)
    if args.list:
        print("\n".join(flood.name for flood in chosen))
        return
    if args.render:
        print(render(read_outcomes(args.render)))
        return
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    more = {
        "commit": commit.stdout.strip() or "unknown",
        "device": f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores",
    }
    outcomes: list[Outcome] = []
    missed = None if args.missed is None else _missed(args.missed)

    def write(outcome: Outcome) -> None:
        outcomes.append(outcome)
        line = outcome.to_json(**more)
        print(line, flush=True)
        print(_describe(outcome), file=sys.stderr, flush=True)
        if args.json is not None:
            with args.json.open("a") as file:
                print(line, file=file)

    for name in (OURS,) if args.no_peer else (GRPCIO,) if args.peer_only else TARGETS:
        for tls in {"both": [False, True], "yes": [True], "no": [False]}[args.tls]:
            fit = [flood for flood in chosen if tls or not flood.tls]
            cases = [(flood, connections) for flood in fit for connections in args.connections]
            if missed is not None:
                cases = [
                    (flood, connections) for flood, connections in cases if (flood.name, connections, tls) in missed
                ]
            _flood_all(name, tls, cases, args.seconds, write)
    print(f"\n{render(outcomes)}")


if __name__ == "__main__":
    main()
