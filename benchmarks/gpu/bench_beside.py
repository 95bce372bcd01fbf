"""Any engine with an OpenAI port, started as its users start it, with no flag but the model, and asked by one client.

``too.sh`` runs it for every engine that is installed. Weights are made up (the one flag more, of each engine), prompts are
random token ids, end tokens are ignored. Prints one JSON object a line; ``--table FILE`` prints a file of them as a table.

start     from the start of the processes to the first token of the first request
shared    64 prompts that share 8192 tokens, 128 of their own, 64 out, the first thing after the start, wave after wave: the
          slowest of the first four, and the median of the last three
decode B  a step of B requests of 1024 tokens while all of them decode, greedy and at temperature 2, whose text nothing predicts
prefill   fresh prompts at once, one token out; the best of three
offline   256 requests at once, prompts of U(100, 1024) tokens, outputs of U(100, 1024)
load      offline's shapes with a quarter of the outputs, so many a second, fresh prompts, at temperature 1

    python benchmarks/gpu/bench_beside.py --config benchmarks/gpu/configs/qwen3-0.6b --engine sapwood
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

from bench_serving import REAL_WORKER, device_name
from commit import measured_commit
from serving_load.load import Clients
from serving_load.services import Services
from serving_load.stream import Stream, percentile, summarize
from serving_load.synthetic_model import write_model
from serving_load.workload import Planned, offline, poisson

OTHERS = {
    "vllm": ("-m", "vllm.entrypoints.openai.api_server", "--model", "{model}", "--port", "{port}", "--load-format", "dummy"),
    "sglang": ("-m", "sglang.launch_server", "--model-path", "{model}", "--port", "{port}", "--load-format", "dummy"),
}  # fmt: skip
"""How the other engines are started."""
_START_SECONDS = 600.0
_WAVES, _FIRST, _LAST = 7, 4, 3
_STEPS = 192


class Engine:
    """A running engine.

    Attributes:
        name: Its name.
        address: Its HTTP port.
        model: What it calls its model.
    """

    def __init__(self, name: str, address: str, model: str) -> None:
        self.name = name
        self.address = address
        self.model = model


@contextmanager
def running(name: str, model: Path, logs: Path, worker: str, flags: list[str]) -> Iterator[Engine]:
    """An engine, from its start to its end.

    Args:
        name: ``sapwood`` or one of ``OTHERS``.
        model: The model's folder.
        logs: Folder for logs.
        worker: The module of Sapwood's worker.
        flags: Flags of that worker.

    Raises:
        TimeoutError: It does not answer.
    """
    if name == "sapwood":
        given = ["--load-format", "dummy", *flags] if worker == REAL_WORKER else flags
        with Services(model, worker, given, [], logs) as services:
            yield Engine(name, services.http, services.name)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, *(part.format(model=model, port=port) for part in OTHERS[name])]
    with (logs / f"{name}.log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            _await(f"http://127.0.0.1:{port}/v1/models", process)
            yield Engine(name, f"127.0.0.1:{port}", str(model))
        finally:
            process.terminate()


def _await(url: str, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + _START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    raise TimeoutError(f"{url} does not answer; exit code {process.poll()}")


class Bench:
    """The rows of the table.

    Args:
        engine: What is asked.
        clients: Who asks.
        name: The model's name.
        vocabulary: Its size.
        divide: Takes all numbers by so much less: only to try it.
        device: For each row.
    """

    def __init__(self, engine: Engine, clients: Clients, name: str, vocabulary: int, divide: int, device: str) -> None:
        self._engine, self._clients = engine, clients
        self._name, self._vocabulary, self._divide, self._device = name, vocabulary, divide, device
        self._draw = random.Random(os.getpid())

    def report(self, what: str, value: float, unit: str) -> None:
        """Prints a row."""
        row = {"what": f"{self._name} {what}", "value": round(value, 4), "unit": unit, "engine": self._engine.name}
        print(json.dumps(row | {"device": self._device, "commit": measured_commit()}), flush=True)

    def run(self, requests: list[Planned]) -> list[Stream]:
        """Asks, and waits for all answers."""
        return self._clients.run("HTTP", self._engine.address, self._engine.model, requests)

    def prompt(self, length: int) -> list[int]:
        """Fresh token ids."""
        return [self._draw.randint(10, min(99_999, self._vocabulary - 1)) for _ in range(max(1, length))]

    def shared(self) -> None:
        """Waves of prompts that share their beginning."""
        count, common, own = max(2, 64 // self._divide), self.prompt(8192 // self._divide), 128 // self._divide
        waves = []
        for _ in range(_WAVES):
            streams = self.run([Planned([*common, *self.prompt(own)], 64 // self._divide) for _ in range(count)])
            waves.append(max(each.arrivals[-1] for each in streams) - min(each.began for each in streams))
        self.report("shared 64 x (8192 + 128), first waves", max(waves[:_FIRST]), "s")
        self.report("shared 64 x (8192 + 128), later", median(waves[-_LAST:]), "s")

    def decode(self, count: int, temperature: float) -> None:
        """A step of so many requests, between the moment when all have begun and that when the first ends."""
        count, outputs = max(1, count // self._divide), max(8, _STEPS // self._divide)
        extra = 2 * count  # steps in which some still wait for their prompts
        found = []
        for _ in range(2):
            prompts = [self.prompt(1024 // self._divide) for _ in range(count)]
            length = outputs + min(extra, 160)
            streams = self.run([Planned(prompt, length, temperature=temperature) for prompt in prompts])
            begun, ended = max(each.arrivals[0] for each in streams), min(each.arrivals[-1] for each in streams)
            # A piece may hold several tokens; each stream's are spread over its pieces.
            tokens = [
                each.tokens * sum(begun < at <= ended for at in each.arrivals) / len(each.arrivals) for each in streams
            ]
            found.append((ended - begun) / max(1e-9, sum(tokens) / count))
        kind = "greedy" if temperature == 0 else f"at temperature {temperature:g}"
        self.report(f"decode {count}, {kind}", min(found) * 1000, "ms a token")

    def prefill(self, count: int) -> None:
        """So many prompts of 8192 tokens at once."""
        count = max(1, count // self._divide)
        seconds = []
        for _ in range(3):
            streams = self.run([Planned(self.prompt(8192 // self._divide), 1) for _ in range(count)])
            seconds.append(max(each.arrivals[0] for each in streams) - min(each.began for each in streams))
        self.report(f"prefill {count} x 8192", min(seconds) * 1000, "ms")

    def offline(self) -> None:
        """256 requests at once."""
        longest = max(2, 1024 // self._divide)
        count = max(2, 256 // self._divide)
        requests = offline(count, self._vocabulary, shortest=min(100, longest), longest=longest)
        self.report("offline256", summarize(self.run(requests)).output_rate, "output tokens/s")

    def load(self, rate: float, count: int) -> None:
        """So many a second, of which each waits for nobody."""
        longest = max(4, 1024 // self._divide)
        shapes = offline(count, self._vocabulary, shortest=min(100, longest), longest=longest, seed=3)
        planned = poisson(shapes, rate, self._vocabulary, fresh=True)  # the same arrivals for all engines
        streams = self.run([Planned(each.prompt, each.outputs, each.at, 1.0) for each in planned])
        found, name = summarize(streams), f"load of {rate:g} a second"
        each = [(s.arrivals[-1] - s.arrivals[0]) / (s.tokens - 1) for s in streams if s.tokens > 1]
        for what, value, unit in (
            ("output rate", found.output_rate, "tokens/s"),
            ("first token p50", found.first_p50 * 1000, "ms"),
            ("first token p99", found.first_p99 * 1000, "ms"),
            ("time a token p50", percentile(each, 0.5) * 1000, "ms"),
            ("time a token p99", percentile(each, 0.99) * 1000, "ms"),
            ("between tokens p99", found.gap_p99 * 1000, "ms"),
        ):
            self.report(f"{name}, {what}", value, unit)


def print_table(path: Path) -> None:
    """A file's rows, with a column for each engine."""
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    found = {(row["what"], row["engine"]): row["value"] for row in rows}
    units = {row["what"]: row["unit"] for row in rows}
    print(f"| figure | {' | '.join(engines)} |\n|---|{'---|' * len(engines)}")
    for what, unit in units.items():
        cells = [f"{found[what, engine]:.4g}" if (what, engine) in found else "" for engine in engines]
        print(f"| {what}, {unit} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="Folder with a config.json.")
    parser.add_argument("--engine", choices=("sapwood", *OTHERS), default="sapwood", help="Which engine.")
    parser.add_argument("--rates", default="20", help="Requests a second of the load (default: 20).")
    parser.add_argument("--requests", type=int, default=256, help="Requests of the load (default: 256).")
    parser.add_argument("--batches", default="1,8,32,128,256", help="Of decodes (default: %(default)s).")
    parser.add_argument("--only", default="shared,decode,prefill,offline,load", help="Which rows (default: all).")
    parser.add_argument("--divide", type=int, default=1, help="Takes all numbers by so much less: only to try it.")
    parser.add_argument("--worker-module", default=REAL_WORKER, help="What to start as Sapwood's worker.")
    parser.add_argument("--worker-flags", default="", help="Its flags: none is as it ships.")
    parser.add_argument("--logs", type=Path, help="Folder for logs; a temporary one if not given.")
    parser.add_argument("--table", type=Path, metavar="FILE.jsonl", help="Measures nothing: prints these.")
    given = parser.parse_args()
    if given.table is not None:
        print_table(given.table)
        return
    if given.config is None:
        parser.error("--config is missing")
    wanted = set(given.only.split(","))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="beside-")))
        model = folder / given.config.name
        model.mkdir()
        write_model(given.config, model)
        logs = given.logs or folder
        logs.mkdir(parents=True, exist_ok=True)
        vocabulary = json.loads((given.config / "config.json").read_text())["vocab_size"]
        clients = stack.enter_context(Clients(4))
        began = time.monotonic()
        engine = stack.enter_context(
            running(given.engine, model, logs, given.worker_module, given.worker_flags.split())
        )
        device = "cpu" if given.worker_module != REAL_WORKER else device_name("cuda", REAL_WORKER)
        bench = Bench(engine, clients, given.config.name, vocabulary, given.divide, device)
        (first,) = bench.run([Planned(bench.prompt(64), 2)])
        bench.report("start to the first token", first.arrivals[0] - began, "s")
        if "shared" in wanted:
            bench.shared()
        for count in map(int, given.batches.split(",") if "decode" in wanted else ()):
            for temperature in (2.0, 0.0):
                bench.decode(count, temperature)
        for count in (1, 8) if "prefill" in wanted else ():
            bench.prefill(count)
        if "offline" in wanted:
            bench.offline()
        for rate in map(float, given.rates.split(",") if "load" in wanted else ()):
            bench.load(rate, given.requests)


if __name__ == "__main__":
    main()
