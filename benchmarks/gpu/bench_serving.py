"""Everything between a client and the GPU: router, tokenizer and worker as processes, streams by gRPC and by HTTP.

    python benchmarks/gpu/bench_serving.py --model benchmarks/gpu/configs/qwen3-0.6b

Prompts are random token ids, greedy, end tokens ignored, one stream a request, on the machine of the services:

start-up  from the start of the processes until all are healthy, and the first request's time to its first token on top
offline   256 requests at once, prompts of U(100, 1024) tokens, outputs of U(100, 1024)
one       single requests of 1024 tokens with 129 outputs, a second apart; medians
poisson   offline's prompts with a quarter of its outputs, so many a second: as fresh prompts, and again as they were in offline
          (the prefix cache has those; before offline it is emptied)

Prints one JSON object a line. Times between tokens are between pieces of an answer as the client got them; how many tokens a
piece has is told as well. ``cores`` is CPU time over time while offline ran. Without a GPU: ``--device cpu`` and a small model,
or ``--worker-module sapwood_testing.worker.fake_worker`` and ``--worker-flags='--step-ms 10'``. ``--spy`` has py-spy record
what each process does while offline runs.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Literal

from commit import measured_commit
from serving_load.load import run_load
from serving_load.services import Services
from serving_load.stream import Summary, summarize
from serving_load.synthetic_model import write_model
from serving_load.workload import Planned, offline, one_by_one, poisson

Kind = Literal["gRPC", "HTTP"]
KINDS: tuple[Kind, ...] = ("gRPC", "HTTP")
REAL_WORKER = "sapwood_worker"


class Bench:
    """The workloads on running services.

    Args:
        services: What to ask.
        options: As parsed.
        vocabulary: The model's size of it.
    """

    def __init__(self, services: Services, options: argparse.Namespace, vocabulary: int) -> None:
        self._services = services
        self._options = options
        self._vocabulary = vocabulary
        self._commit = measured_commit()
        self._requests = offline(options.requests, vocabulary, shortest=options.shortest, longest=options.longest)

    def report(self, what: str, value: float, unit: str, **conditions: float) -> None:
        row = {"what": f"{variant_of(self._options)} {what}", "value": round(value, 4), "unit": unit}
        row |= {"engine": "sapwood", "overlap": True, "device": self._options.device_name, "commit": self._commit}
        row |= conditions
        print(json.dumps(row), flush=True)

    def first_token(self) -> float:
        """Seconds that the very first request waits for its first token."""
        (stream,) = run_load(
            "gRPC",
            self._services.grpc,
            self._services.name,
            one_by_one(1, 64, 2, self._vocabulary, apart=1.0, seed=8),
            1,
        )
        return stream.arrivals[0] - stream.began

    def warm_up(self) -> None:
        """Nothing that is measured is the first of its kind."""
        for kind in KINDS:
            self._load(kind, offline(8, self._vocabulary, shortest=4, longest=self._options.longest, seed=9))

    def offline(self, kind: Kind) -> None:
        self._services.flush_cache()
        with self._spied(kind):
            before, began = self._services.cpu_seconds(), time.monotonic()
            found = self._load(kind, self._requests)
            after, seconds = self._services.cpu_seconds(), time.monotonic() - began
        name = f"offline{len(self._requests)} {kind}"
        self.report(name, found.output_rate, "output tokens/s")
        self._report_times(name, found)
        for process, used in after.items():
            self.report(f"{name} {process}", (used - before[process]) / seconds, "cores")

    def one(self, kind: Kind) -> None:
        options = self._options
        length, outputs = options.longest, min(129, options.longest)
        # The client's own first request is not counted.
        requests = one_by_one(
            options.singles + 1, length, outputs, self._vocabulary, apart=1.0, seed=100 + KINDS.index(kind)
        )
        streams = run_load(kind, self._address(kind), self._services.name, requests, processes=1)[1:]
        name = f"one {length} {kind}"
        first = [stream.arrivals[0] - stream.began for stream in streams]
        between = [(stream.arrivals[-1] - stream.arrivals[0]) / (outputs - 1) for stream in streams]
        self.report(f"{name} TTFT", median(first) * 1000, "ms")
        self.report(f"{name} inter-token", median(between) * 1000, "ms")

    def poisson(self, kind: Kind, *, fresh: bool) -> None:
        rate = self._options.rate
        # Each kind has its own fresh prompts: the other's are cached by now.
        seed = 1 + KINDS.index(kind)
        found = self._load(kind, poisson(self._requests, rate, self._vocabulary, fresh=fresh, seed=seed))
        self._report_times(f"poisson {'fresh' if fresh else 'cached'} {kind}", found, a_second=rate)

    def _load(self, kind: Kind, requests: list[Planned]) -> Summary:
        return summarize(run_load(kind, self._address(kind), self._services.name, requests, self._options.clients))

    def _address(self, kind: Kind) -> str:
        return self._services.grpc if kind == "gRPC" else self._services.http

    def _report_times(self, name: str, found: Summary, **conditions: float) -> None:
        figures = {
            "TTFT p50": found.first_p50,
            "TTFT p99": found.first_p99,
            "inter-token p50": found.gap_p50,
            "inter-token p99": found.gap_p99,
            "mean inter-token p50": found.mean_p50,
            "mean inter-token p99": found.mean_p99,
        }
        for what, seconds in figures.items():
            self.report(f"{name} {what}", seconds * 1000, "ms", **conditions)
        self.report(f"{name} piece", found.tokens_a_piece, "tokens", **conditions)

    @contextmanager
    def _spied(self, kind: Kind) -> Iterator[None]:
        """Has py-spy sample every process, if it is to."""
        folder: Path | None = self._options.spy
        spies = []
        for name, pid in self._services.processes().items() if folder is not None else ():
            command = ["py-spy", "record", "--format", "raw", "--rate", "200", "--duration", "600", "--nonblocking"]
            command += ["--pid", str(pid), "--output", f"{folder}/{variant_of(self._options)}-{kind}-{name}.txt"]
            spies.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        try:
            yield
        finally:
            for spy in spies:
                spy.send_signal(2)  # as Ctrl-C: it writes what it has
                spy.wait(30)


def variant_of(options: argparse.Namespace) -> str:
    """The model's name, with what makes it another: no figure of a float8 model is taken for the plain one's."""
    quantization = "" if options.quantization == "none" else f"+{options.quantization}"
    return f"{options.model.name}{quantization}{'' if options.kv_cache_dtype == 'auto' else '+fp8-kv'}"


def device_name(device: str, worker_module: str) -> str:
    if device == "cpu" or worker_module != REAL_WORKER:
        return "cpu"
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Folder with a config.json.")
    parser.add_argument("--only", default="offline,one,poisson", help="Which workloads (default: all).")
    parser.add_argument("--kinds", default=",".join(KINDS), help="By which protocols (default: both).")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="The worker's (default: cuda).")
    parser.add_argument("--requests", type=int, default=256, help="How many in offline and poisson (default: 256).")
    parser.add_argument("--shortest", type=int, default=100, help="Tokens of the shortest prompt and output.")
    parser.add_argument("--longest", type=int, default=1024, help="Tokens of the longest.")
    parser.add_argument("--rate", type=float, default=20.0, help="Arrivals a second in poisson (default: 20).")
    parser.add_argument("--prompts", default="cached,fresh", help="Which prompts in poisson (default: both).")
    parser.add_argument("--singles", type=int, default=7, help="How many single requests (default: 7).")
    parser.add_argument("--clients", type=int, default=4, help="Processes of the load generator (default: 4).")
    parser.add_argument("--kv-gb", type=float, default=60.0, help="KV cache in GiB (default: 60).")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8_e4m3"), default="auto", help="Of the KV cache.")
    parser.add_argument(
        "--quantization",
        choices=("none", "fp8", "fp8_block", "fp8_tensor"),
        default="none",
        help="Of the linear layers.",
    )
    parser.add_argument("--worker-module", default=REAL_WORKER, help="What to start as the worker.")
    parser.add_argument("--worker-flags", default="", help="More flags of the worker, in one argument.")
    parser.add_argument("--router-flags", default="", help="More flags of the router, in one argument.")
    parser.add_argument("--logs", type=Path, help="Folder for the services' logs; a temporary one if not given.")
    parser.add_argument("--spy", type=Path, help="Folder for py-spy's records; needs py-spy on the PATH.")
    options = parser.parse_args()
    options.device_name = device_name(options.device, options.worker_module)
    wanted, kinds = set(options.only.split(",")), [kind for kind in KINDS if kind in options.kinds.split(",")]
    worker_flags = ["--max-running", "256", "--max-step-tokens", "8192", "--kv-cache-gb", str(options.kv_gb)]
    if options.worker_module == REAL_WORKER:
        worker_flags += ["--load-format", "dummy", "--device", options.device, "--context-length", "16384"]
        worker_flags += ["--kv-cache-dtype", options.kv_cache_dtype, "--quantization", options.quantization]
    worker_flags += shlex.split(options.worker_flags)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-serving-")))
        model = folder / options.model.name
        model.mkdir()
        write_model(options.model, model)
        logs = options.logs or folder
        for each in (logs, options.spy):
            if each is not None:
                each.mkdir(parents=True, exist_ok=True)
        vocabulary = json.loads((options.model / "config.json").read_text())["vocab_size"]
        services = stack.enter_context(
            Services(model, options.worker_module, worker_flags, shlex.split(options.router_flags), logs)
        )
        bench = Bench(services, options, vocabulary)
        bench.report("start-up of the worker's processes", services.worker_seconds, "s")
        bench.report("start-up to first token", services.seconds + bench.first_token(), "s")
        bench.warm_up()
        for kind in kinds:
            if "one" in wanted:
                bench.one(kind)
            if "offline" in wanted:
                bench.offline(kind)
            for prompts in options.prompts.split(",") if "poisson" in wanted else ():
                bench.poisson(kind, fresh=prompts == "fresh")
    print("done", file=sys.stderr)


if __name__ == "__main__":
    main()
