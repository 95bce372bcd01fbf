"""Other clients of the router while strangers flood it, and the same floods beside grpcio's server.

    make bench-floods                                       everything, half an hour or so
    make bench-floods ARGS='--floods PING --connections 1'  these alone

For each flood, on one attacking connection and on ten, without TLS and with it: the p99 of other clients (health over gRPC; with
a key, completions over gRPC and HTTP; each on new connections and on kept ones) just before and during the flood, the server's
resident memory before, at most, and after, and what became of the attacker, who comes again at once wherever he is closed.
A router with two mock workers (``router_load/mock_worker.py``) is attacked, each flood a process of its own, over loopback.

A goal is met if each kind's p99 is at most 3 times the calm one and 20 ms, and memory at most 100 MB above the calm one and back.
Prints a line of JSON for each, then a table in Markdown for docs/security.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from floods.attacker import Fate
from floods.flood import Flood
from floods.tables import FLOODS
from floods.targets import GRPCIO, OURS, Target, grpcio_server, router
from report import cpu_name
from router_load.engines import cpu_seconds, resident_mb
from router_load.load import percentile

_HERE = Path(__file__).resolve().parent
_LEAST_REST, _MOST_REST = 0.5, 20.0
"""Seconds between the end of a flood and the look at the memory after it."""
_RATIO, _ADDED, _MOST_MB = 3.0, 0.02, 100.0

TARGETS: dict[str, Callable[[Path, bool], AbstractContextManager[Target]]] = {OURS: router, GRPCIO: grpcio_server}


@dataclass(frozen=True)
class Outcome:
    """One flood of one server. Seconds, and MB."""

    flood: str
    server: str
    connections: int
    tls: bool
    calm: dict[str, float]
    flooded: dict[str, float]
    failed: dict[str, int]
    memory_before: float
    memory_most: float
    memory_after: float
    cores: float
    """That the server took."""
    fate: Fate

    @property
    def worst(self) -> tuple[str, float]:
        """The kind of other clients that came off worst, and its p99 as a share of what the goal lets it be."""
        shares = {kind: p99 / (_RATIO * self.calm[kind] + _ADDED) for kind, p99 in self.flooded.items()}
        return max(shares.items(), key=lambda item: item[1])

    @property
    def met(self) -> bool:
        grown = self.memory_most - self.memory_before
        return not self.failed and self.worst[1] <= 1 and grown <= _MOST_MB


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
    calm, failed = others.measure(seconds)
    assert not failed, failed
    before, spent, began = resident_mb(pid), cpu_seconds(pid), time.monotonic()
    port = target.grpc_port if flood.front == "grpc" else target.http_port
    command = [sys.executable, "-m", "floods.attacker", flood.name, "--port", str(port)] + ["--tls"] * target.tls
    command += ["--connections", str(connections), "--seconds", str(seconds + 1)]
    with MemoryWatch(pid) as memory:
        attacker = subprocess.Popen(command, cwd=_HERE, stdout=subprocess.PIPE, text=True)
        time.sleep(1)  # it starts, and has its first burst behind it
        flooded, failed = others.measure(seconds)
        assert attacker.stdout is not None
        said = attacker.stdout.read()
        attacker.wait()
    cores = (cpu_seconds(pid) - spent) / (time.monotonic() - began)
    after = _memory_after(pid, before)
    fate = Fate(**json.loads(said))
    return Outcome(
        flood.name, target.name, connections, target.tls, calm, flooded, failed, before, memory.most, after, cores, fate
    )


def _memory_after(pid: int, before: float) -> float:
    """Once it is back, or it has had its time."""
    time.sleep(_LEAST_REST)
    until = time.monotonic() + _MOST_REST
    while (now := resident_mb(pid)) > before + _MOST_MB / 2 and time.monotonic() < until:
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


def _print_line(outcome: Outcome) -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    row = {**asdict(outcome), "met": outcome.met, "commit": commit.stdout.strip() or "unknown"}
    print(json.dumps({**row, "device": f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores"}), flush=True)
    kind, share = outcome.worst
    grown = outcome.memory_most - outcome.memory_before
    where = f"{outcome.server}, {outcome.connections}{', TLS' if outcome.tls else ''}"
    print(
        f"{outcome.flood} ({where}): {kind} {1000 * outcome.calm[kind]:.0f} -> {1000 * outcome.flooded[kind]:.0f} ms, "
        f"+{grown:.0f} MB, {outcome.cores:.2f} cores{'' if outcome.met else f', MISSED {share:.1f}'} {outcome.failed or ''}",
        file=sys.stderr,
    )


def _print_table(outcomes: list[Outcome]) -> None:
    """Ours, and grpcio's beside it; milliseconds, and MB above the calm."""
    by_place = {(each.server, each.flood, each.connections, each.tls): each for each in outcomes}
    print(
        "\n| flood | connections | p99 calm, ms | under it, ms | worst for | MB more | after | attacker | grpcio, ms | MB more |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for (server, flood, connections, tls), ours in by_place.items():
        if server != OURS:
            continue
        kind, _ = ours.worst
        cells = [flood, f"{connections}{', TLS' if tls else ''}", f"{1000 * ours.calm[kind]:.0f}"]
        cells += [f"{1000 * ours.flooded[kind]:.0f}{'' if ours.met else ' **missed**'}", kind]
        cells += [f"{ours.memory_most - ours.memory_before:.0f}", f"{ours.memory_after - ours.memory_before:.0f}"]
        cells.append(_fate(ours.fate))
        peer = by_place.get((GRPCIO, flood, connections, tls))
        if peer is None:
            cells += ["", ""]
        else:
            kind, _ = peer.worst
            failed = f", {sum(peer.failed.values())} failed" if peer.failed else ""
            cells += [f"{1000 * peer.calm[kind]:.0f} → {1000 * peer.flooded[kind]:.0f}{failed}"]
            cells.append(f"{peer.memory_most - peer.memory_before:.0f}")
        print(f"| {' | '.join(cells)} |")


def _fate(fate: Fate) -> str:
    if not fate.closed:
        return f"{fate.sent / 1e6:.1f} MB taken"
    rule = max(fate.rules.items(), key=lambda item: item[1])[0]
    return f"closed {fate.closed} times, after {fate.first_closed:.1f} s: {rule}"


def main() -> None:
    names = [flood.name for flood in FLOODS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--floods", nargs="*", choices=names, default=names, help="which; all if none", metavar="FLOOD")
    parser.add_argument("--connections", nargs="*", type=int, default=[1, 10])
    parser.add_argument("--tls", choices=["both", "yes", "no"], default="both")
    parser.add_argument("--no-peer", action="store_true", help="ours alone")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each flood, and of the calm before it")
    args = parser.parse_args()
    chosen = [flood for flood in FLOODS if flood.name in args.floods]
    outcomes: list[Outcome] = []
    for name, make in TARGETS.items():
        for tls in {"both": [False, True], "yes": [True], "no": [False]}[args.tls]:
            if args.no_peer and name != OURS:
                continue
            with _attacked(make, tls) as (target, others):
                for flood in chosen:
                    if flood.front == "http" and not target.http_port:
                        continue
                    for connections in args.connections:
                        outcomes.append(_flood(target, others, flood, connections, args.seconds))
                        _print_line(outcomes[-1])
    _print_table(outcomes)


if __name__ == "__main__":
    main()
