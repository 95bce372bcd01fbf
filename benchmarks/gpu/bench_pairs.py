"""What a prefill worker and a decode worker do for those who generate, next to the same two workers when both do all.

    python benchmarks/gpu/bench_pairs.py --model benchmarks/gpu/configs/llama-3.1-8b

Two workers on two GPUs, a tokenizer and a router. Random prompts, greedy, end tokens ignored:

handoff what ``bench_handoff.py`` measures
decode  ``--streams`` answers of ``--outputs`` tokens, and the 99th percentile of the times between their pieces: alone, while
        prompts of ``--long`` tokens come ``--rate`` a second to a prefill worker (1 + 1), and while they come to two workers that
        do both. ``ratio`` is to that alone
mixes   answers a second of four mixes of prompts and answers, all ``--requests`` at once, with ``--disaggregate`` always, never
        and auto in turns (of always or never no more than of the first starts if it is far behind). Two processes of one program
        need not be equally fast: so ``--routers`` of each way are started together, one of each way is a start, and after
        ``--start-seconds`` for each of these others are started; clients start once. ``ratio`` is auto's
        to the better of the two: the Hodges-Lehmann estimate of the starts' ratios, each of medians, which lies between ``low``
        and ``high`` in 95 of 100 such measurements (``serving_load/comparison.py``); the rates next to it are medians of starts.
        A mix has ``--mix-seconds``, and what the mixes before it left when their ratios were known to one in a hundred. ``pairs``
        is how many auto handed over, ``weighed`` how many it weighed

Prints one JSON object a line. Without GPUs: ``--device cpu``, a small model and small numbers.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median

import grpc
from bench_handoff import Stages, free_port, measure
from commit import measured_commit
from serving_load.comparison import compare
from serving_load.load import Clients
from serving_load.services import Service, ServiceFailedError, gpus_of_pair
from serving_load.stream import Stream, percentile
from serving_load.synthetic_model import write_model
from serving_load.workload import Planned

from sapwood.v1 import worker_pb2, worker_pb2_grpc

WAYS = ("always", "never", "auto")
MIXES = {
    "documents": ((8000, 60), (6000, 100)),
    "documents with long answers": ((8000, 200), (4000, 400)),
    "chats beside documents": ((300, 300), (300, 200), (8000, 100)),
    "chats": ((200, 250), (500, 150)),
}
"""Lengths of prompts and answers, in turns; those first that vary least from burst to burst and leave time to the others."""
_START_SECONDS = 60.0
_BEHIND = 0.85
"""Below this share of the other's answers a second, ``always`` or ``never`` is measured twice and no more."""
_KNOWN = 1.01
"""A ratio is known when its upper bound is so little above its lower one."""
ROLES = {
    "both": worker_pb2.WORKER_ROLE_BOTH,
    "prefill": worker_pb2.WORKER_ROLE_PREFILL,
    "decode": worker_pb2.WORKER_ROLE_DECODE,
}


class Pair:
    """Two workers and a tokenizer.

    Args:
        options: As parsed.
        folder: The model's.
        stack: Ends them.
    """

    def __init__(self, options: argparse.Namespace, folder: Path, stack: ExitStack) -> None:
        self.options, self.logs = options, options.logs or folder
        self.vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
        self._draw = random.Random(1)
        shared = ["--port", "0", "--model", str(folder), "--served-model-name", "pair"]
        flags = ["--load-format", "dummy", "--device", options.device, "--kv-cache-gb", str(options.kv_gb)]
        flags += ["--host-cache", str(options.host_gb), "--kv-transfer", options.mover]
        flags += ["--context-length", "16384"]
        flags += ["--max-running", "256", "--max-step-tokens", str(options.step_tokens)]
        flags += ["--log-level", "debug"] if options.stages else []
        started, self.metrics = [], free_port()
        for role, gpu in zip(("prefill", "decode"), gpus_of_pair(options.device), strict=True):
            its = [*shared, *flags, "--role", role, "--metrics-port", str(self.metrics if role == "decode" else 0)]
            started.append(Service(role, "sapwood_worker", its, self.logs, gpu))
            stack.callback(started[-1].stop)
        tokenizer = Service("tokenizer", "sapwood_tokenizer", [*shared, "--metrics-port", "0"], self.logs)
        stack.callback(tokenizer.stop)
        self.workers = [each.address() for each in started]
        self.stages = Stages({each.name: self.logs / f"{each.name}.log" for each in started} if options.stages else {})
        self.tokenizer = tokenizer.address()
        self._clients = stack.enter_context(Clients(options.clients))

    def set_roles(self, *roles: str) -> None:
        """What the workers are for from now on."""
        for address, role in zip(self.workers, roles, strict=True):
            with grpc.insecure_channel(address) as channel:
                worker_pb2_grpc.WorkerStub(channel).SetRole(worker_pb2.SetRoleRequest(role=ROLES[role]), timeout=60)

    def empty_caches(self) -> None:
        """The workers forget all prompts."""
        for address in self.workers:
            with grpc.insecure_channel(address) as channel:
                worker_pb2_grpc.WorkerStub(channel).FlushCache(worker_pb2.FlushCacheRequest(), timeout=60)

    @contextmanager
    def routers(self, *ways: str, count: int = 1) -> Iterator[list[dict[str, Front]]]:
        """So many routers in front of the workers for each way to disaggregate, with empty caches."""
        self.empty_caches()
        with ExitStack() as stack:
            started = [{way: self._router(way, number, stack) for way in ways} for number in range(count)]
            starts = [
                {
                    way: Front(service.address("gRPC"), service.address("HTTP"), self._clients)
                    for way, service in services.items()
                }
                for services in started
            ]
            for front in (front for fronts in starts for front in fronts.values()):
                front.ask([Planned(self.prompt(32), 2) for _ in range(4)])
            yield starts

    def _router(self, way: str, number: int, stack: ExitStack) -> Service:
        flags = ["--port", "0", "--http-port", "0", "--tokenizer", self.tokenizer]
        flags += ["--disaggregate", way, "--workers", *self.workers]
        service = Service(f"router-{way}-{number}", "sapwood_router", flags, self.logs)
        stack.callback(service.stop)
        return service

    def burst(self, front: Front, shapes: Sequence[tuple[int, int]]) -> float:
        """Answers a second of new prompts, and answers, of such lengths that are asked for at once; caches are empty."""
        self.empty_caches()
        found = front.ask([self.planned(*each) for each in shapes])
        return len(found) / (max(each.arrivals[-1] for each in found) - min(each.began for each in found))

    def planned(self, length: int, outputs: int) -> Planned:
        """A request with a new prompt."""
        return Planned(self.prompt(length), outputs)

    def prompt(self, length: int) -> list[int]:
        """A new one."""
        return self._draw.choices(range(10, min(100_000, self.vocabulary)), k=length)


class Front:
    """A router.

    Args:
        address: Where it takes gRPC.
        http: Where it tells its metrics.
        clients: The load generator.
    """

    def __init__(self, address: str, http: str, clients: Clients) -> None:
        self._address, self._http, self._clients = address, http, clients
        until = time.monotonic() + _START_SECONDS
        while self.count("worker_available") < 2:
            if time.monotonic() > until:
                raise ServiceFailedError("the router does not find both workers")
            time.sleep(0.1)

    def ask(self, requests: Sequence[Planned]) -> list[Stream]:
        """Sends requests; answers come in another order where there are several clients."""
        return self._clients.run("gRPC", self._address, "pair", list(requests))

    def count(self, name: str) -> float:
        """A figure of its metrics page; 0 if it is not there."""
        try:
            with urllib.request.urlopen(f"http://{self._http}/metrics", timeout=10) as page:
                text = page.read().decode()
        except OSError:
            return 0.0
        return sum(float(value) for value in re.findall(rf"^sapwood_router_{name}\S* (\S+)$", text, re.MULTILINE))


def handoff(pair: Pair, say: Say) -> None:
    """What a KV transfer adds."""
    pair.set_roles("prefill", "decode")
    pair.empty_caches()
    for found in measure(*pair.workers, pair.metrics, pair.vocabulary, pair.stages, pair.options):
        say(what="hand-over", **found)


def decode(pair: Pair, say: Say) -> None:
    """The times between pieces of those who generate."""
    options = pair.options
    alone = 0.0
    for what, roles, mode, loaded in (
        ("decode alone", ("prefill", "decode"), "always", False),
        ("1 + 1", ("prefill", "decode"), "always", True),
        ("two both", ("both", "both"), "never", True),
    ):
        pair.set_roles(*roles)
        with pair.routers(mode) as [fronts]:
            streams = [pair.planned(128, options.outputs) for _ in range(options.streams)]
            draw, at, prompts = random.Random(2), 1.0, []
            while loaded and at < options.seconds:
                prompts.append(Planned(pair.prompt(options.long), 4, at))
                at += draw.expovariate(options.rate)
            began = time.monotonic()
            found = fronts[mode].ask([*streams, *prompts])
        generating = [each for each in found if each.tokens == options.outputs]
        gaps = [b - a for each in generating for a, b in zip(each.arrivals, each.arrivals[1:], strict=False)]
        first = [each.arrivals[0] - each.began for each in found if each.tokens != options.outputs]
        p99 = percentile(gaps, 0.99)
        alone = alone or p99
        inside = {}
        for stage in ("tokens sent", "tokens at front") if options.stages else ():
            steps = pair.stages.gaps("decode", stage, began)
            inside[f"{stage}_p99_ms"] = 1000 * percentile(steps, 0.99)
        say(
            what=what,
            gap_p50_ms=1000 * percentile(gaps, 0.5),
            gap_p99_ms=1000 * p99,
            ratio=p99 / alone,
            long_prompts=len(prompts),
            long_first_p50_ms=1000 * percentile(first, 0.5),
            **inside,
        )


def mixes(pair: Pair, say: Say) -> None:
    """Answers a second; the three ways in turns."""
    options = pair.options
    pair.set_roles("prefill", "decode")
    end = time.monotonic() + options.mix_seconds * len(MIXES)
    for left, (name, lengths) in zip(range(len(MIXES), 0, -1), MIXES.items(), strict=True):
        shapes = [lengths[number % len(lengths)] for number in range(options.requests)]
        shapes = [(int(options.scale * p), max(2, int(options.scale * a))) for p, a in shapes]
        now = time.monotonic()
        _mix(pair, name, shapes, now + (end - now) / left, say)


def _mix(pair: Pair, name: str, shapes: Sequence[tuple[int, int]], until: float, say: Say) -> None:
    starts: list[dict[str, float]] = []
    while True:
        starts += _rates(pair, shapes, _worth_it(starts), partial(say, what=f"{name}, a round"))
        better = max(("always", "never"), key=lambda way: _median(starts, way))
        compared = compare([(rates["auto"], rates[better]) for rates in starts if better in rates])
        if len(starts) >= 2 and (time.monotonic() > until or compared.known_within(_KNOWN)):
            break
    medians = {way: _median(starts, way) for way in WAYS}
    say(what=name, **medians, **compared._asdict(), by="Hodges-Lehmann of starts")


def _rates(
    pair: Pair, shapes: Sequence[tuple[int, int]], ways: Sequence[str], say: Callable[..., None]
) -> list[dict[str, float]]:
    """Answers a second of each way by some starts of routers: of each the medians of some rounds, which are told one by one."""
    options = pair.options
    rounds: list[list[dict[str, float]]] = [[] for _ in range(options.routers)]
    with pair.routers(*ways, count=options.routers) as starts:
        until = time.monotonic() + options.start_seconds * options.routers
        for front in (front for fronts in starts for front in fronts.values()):
            pair.burst(front, shapes[: max(1, len(shapes) // 4)])  # what auto measures of the mix
        while not rounds[0] or time.monotonic() < until:
            for number, (fronts, found) in enumerate(zip(starts, rounds, strict=True)):
                before = _counts(fronts["auto"])
                order = ways[:: -1 if (number + len(found)) % 2 else 1]
                found.append({way: pair.burst(fronts[way], shapes) for way in order})
                pairs, weighed = (b - a for a, b in zip(before, _counts(fronts["auto"]), strict=True))
                say(**found[-1], pairs=pairs, weighed=weighed)
    return [{way: _median(found, way) for way in ways} for found in rounds]


def _counts(front: Front) -> tuple[int, int]:
    """Requests that were handed over, and that were weighed."""
    return int(front.count("handoffs_total")), int(front.count("disaggregation_weighed_total"))


def _worth_it(starts: Sequence[dict[str, float]]) -> tuple[str, ...]:
    """The ways to measure once more: not the one of ``always`` and ``never`` that is far behind."""
    behind = ""
    if len(starts) >= 2:
        always, never = _median(starts, "always"), _median(starts, "never")
        behind = "always" if always < _BEHIND * never else "never" if never < _BEHIND * always else ""
    return tuple(way for way in WAYS if way != behind)


def _median(found: Sequence[dict[str, float]], way: str) -> float:
    return median(rates[way] for rates in found if way in rates)


class Say:
    """Prints figures."""

    def __init__(self, model: str) -> None:
        self._named = {"commit": measured_commit(), "model": model}

    def __call__(self, **figures: object) -> None:
        rounded = {name: round(value, 3) if isinstance(value, float) else value for name, value in figures.items()}
        print(json.dumps(self._named | rounded), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="A folder with a config.json.")
    parser.add_argument("--only", default="handoff,decode,mixes", help="Which parts.")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--mover", default="auto", help="--kv-transfer of the workers.")
    parser.add_argument("--kv-gb", type=float, default=40.0, help="KV cache of each worker in GiB.")
    parser.add_argument("--host-gb", type=float, default=12.0, help="Its second tier in GiB.")
    parser.add_argument("--step-tokens", type=int, default=8192, help="Most tokens of a step.")
    parser.add_argument("--streams", type=int, default=16, help="Answers at a time in decode.")
    parser.add_argument("--outputs", type=int, default=1500, help="Their tokens.")
    parser.add_argument("--long", type=int, default=8192, help="Tokens of the prompts next to them.")
    parser.add_argument("--rate", type=float, default=2.0, help="Of these a second.")
    parser.add_argument("--seconds", type=float, default=10.0, help="For so long they come.")
    parser.add_argument("--requests", type=int, default=48, help="Of a mix.")
    parser.add_argument("--mix-seconds", type=float, default=45.0, help="For each mix, on average.")
    parser.add_argument("--routers", type=int, default=3, help="Of each way in a mix that run at a time.")
    parser.add_argument(
        "--start-seconds", type=float, default=4.0, help="So long each of these runs before others are started."
    )
    parser.add_argument("--lengths", default="1024,8192", help="Tokens of prompts that are handed over.")
    parser.add_argument("--repeats", type=int, default=5, help="Of these of each length.")
    parser.add_argument("--stages", action="store_true", help="Tell when each stage of a KV transfer is reached.")
    parser.add_argument("--scale", type=float, default=1.0, help="By which a mix's lengths are multiplied.")
    parser.add_argument("--logs", type=Path, help="A folder for the services' logs.")
    parser.add_argument("--clients", type=int, default=4, help="Processes of the load generator.")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-pairs-")))
        write_model(options.model, folder)
        pair = Pair(options, folder, stack)
        say = Say(options.model.name)
        for part in options.only.split(","):
            {"handoff": handoff, "decode": decode, "mixes": mixes}[part](pair, say)


if __name__ == "__main__":
    main()
