"""Sparse models over the GPUs of a machine, in one command: whether answers are those of one GPU, then Qwen3-30B-A3B's shape and
DeepSeek-V3's, in float8 by blocks with as many layers as fit, in each way that ranks can share them: tensor parallel (tp), whole
experts (ep), data-parallel attention as well (dp), rows that go to the ranks of their experts only (direct, direct-float8).
Weights are made up, tokens spread evenly over experts. Then a table next to the least times that such GPUs could take.

Parts are processes with time limits of their own, so that where one way fails the others continue; those that would begin after
the budget are left out, and named. Each imports while the one before measures. Where a size leaves GPUs free, several measure
at once.

    python benchmarks/gpu/sparse_gpus.py OUT.jsonl                                # 4 GPUs, then 2; 250 s
    python benchmarks/gpu/sparse_gpus.py OUT.jsonl --gpus 8 --sizes 8 --shapes deepseek-v3 --budget 560
    python benchmarks/gpu/sparse_gpus.py OUT.jsonl --table                        # only the table
    python benchmarks/gpu/sparse_gpus.py OUT.jsonl --device cpu --gpus 2 --sizes 2    # tries it, with tiny shapes
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO

import sparse_shape

HERE = Path(__file__).parent
QWEN, DEEPSEEK = "qwen3-30b-a3b", "deepseek-v3"
FLAGS = {
    "tp": [], "ep": ["--expert-parallel"], "dp": ["--expert-parallel", "--data-parallel-attention"],
    "direct": ["--expert-parallel", "--data-parallel-attention", "--expert-dispatch", "direct"],
    "direct-float8": ["--expert-parallel", "--data-parallel-attention", "--expert-dispatch", "direct-float8"],
}  # fmt: skip
OFFLINE = "tp", "ep", "dp", "direct"
"""Ways of Qwen3-30B-A3B that 256 whole requests are measured in, too."""
KV_GB = 36
"""GiB of all ranks' caches together, which 256 requests of Qwen3-30B-A3B need."""
LAYER_KV_GB = 0.36
"""GiB of a layer's latents of as many requests."""
BATCHES = 1, 64, 256


class Machine:
    """Args: arguments: main's; folder: for shapes and locks; lines, errors: what parts print."""

    def __init__(self, arguments: argparse.Namespace, folder: Path, lines: IO[str], errors: IO[str]) -> None:
        self.arguments, self.folder, self.lines, self.errors = arguments, folder, lines, errors
        self.began, self.failed = time.monotonic(), 0
        self._started: list[subprocess.Popen[bytes]] = []
        self._queue: deque[list[str]] = deque()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(each) for each in range(arguments.gpus)]
        self.gpus = names[: arguments.gpus]

    def say(self, text: str) -> None:
        """Prints a line with the time."""
        line = f"# {time.monotonic() - self.began:.0f} s: {text}"
        print(line, flush=True)
        print(line, file=self.lines, flush=True)

    def shape(self, name: str, size: int) -> Path:
        """The folder of a shape over so many GPUs."""
        tiny = self.arguments.device == "cpu"
        if name != DEEPSEEK and not tiny:
            return HERE / "configs" / name
        folder = self.folder / f"{size}" / name
        if not folder.exists() and name == DEEPSEEK:
            sparse_shape.make(folder, size, 0 if tiny else memory(), self.arguments.layers)
        elif not folder.exists():
            sparse_shape.make_tiny(folder, name)
        return folder

    def measure(self, shape: str, size: int, way: str) -> list[str]:
        """What measures a shape in a way over so many GPUs."""
        given = self.arguments
        command = [str(HERE / "bench_engine.py"), "--model", str(self.shape(shape, size)), "--device", given.device]
        command += ["--tensor-parallel", str(size), *FLAGS[way], "--diverging-rank", str(given.diverging_rank)]
        if given.device == "cpu":
            return [*command, "--kv-gb", "0.2", "--only", "steady,prefill", "--batches", "1,4", "--prefills", "1x64"]
        own = FLAGS[way].count("--data-parallel-attention")
        if shape == QWEN:
            kv, only = KV_GB / size, "steady,offline" if way in OFFLINE and not given.quick else "steady"
        else:
            layers = json.loads((self.shape(shape, size) / "config.json").read_text())["num_hidden_layers"]
            kv, only = layers * LAYER_KV_GB / (size if own else 1), "steady" if given.quick else "steady,prefill"
        command += ["--kv-gb", f"{kv:.2f}", "--only", only, "--prefills", "1x8192", "--routing", "uniform"]
        command += ["--batches", ",".join(map(str, BATCHES))]
        if given.quick:
            sizes = sorted({max(1, batch // (size if own else 1)) for batch in BATCHES})
            command += ["--graph-sizes", ",".join(map(str, sizes))]
        command += ["--attention-backend", "triton"]  # FlashInfer's kernels would be waited for
        command += ["--expert-tuning", str(given.tuning)] if given.tuning else []
        return command + (["--profile", str(given.profile)] if given.profile else [])

    def run_all(self) -> None:
        """Runs the parts: a size after the other, the largest first."""
        given = self.arguments
        for size in sorted(map(int, given.sizes.split(",")), reverse=True):
            jobs: list[list[str]] = []
            if given.check and size == max(map(int, given.sizes.split(","))):
                ways = ",".join(way for way in given.ways.split(",") if way != "tp") or "tp"
                check = [str(HERE / "checks" / "check_tensor_parallel.py"), "--sizes", str(size), "--ways", ways]
                jobs.append([*check, "--device", given.device])
            for shape in given.shapes.split(","):
                for row in sparse_shape.floors(self.shape(shape, size), size):
                    print(json.dumps(row), file=self.lines, flush=True)
                jobs += [self.measure(shape, size, way) for way in given.ways.split(",")]
            places = [self.gpus[first : first + size] for first in range(0, len(self.gpus) - size + 1, size)]
            self._queue.extend(jobs)
            with ThreadPoolExecutor(len(places)) as threads:
                list(threads.map(self._work, places))
        self.say(f"done, {self.failed} failed")

    def stop(self, *_: object) -> None:
        """Ends what runs, whose ranks first say where they are, and begins nothing more."""
        self.arguments.budget = 0.0
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self._started:
                _end(process, number)
            time.sleep(1)

    def _work(self, gpus: Sequence[str]) -> None:
        """Runs what is queued on some GPUs; the next begins to import while one runs, and gets the lock when it is done."""
        lock = self.folder / f"{'-'.join(gpus)}.lock"
        running: deque[tuple[str, float, subprocess.Popen[bytes]]] = deque()
        while self._queue or running:
            if self._queue and len(running) < 2:
                job = self._queue.popleft()
                shown = " ".join([Path(job[0]).name, *job[1:]])
                if time.monotonic() - self.began > self.arguments.budget:
                    self.say(f"left out: {shown}")
                    continue
                self.say(f"on {','.join(gpus)}: {shown}")
                running.append((shown, time.monotonic(), self._start(job, gpus, lock)))
                continue
            shown, started, process = running.popleft()
            try:
                code = process.wait(max(1.0, started + self.arguments.limit * 2 - time.monotonic()))
            except subprocess.TimeoutExpired:
                _end(process, signal.SIGTERM)
                code = 124
                with suppress(subprocess.TimeoutExpired):
                    process.wait(5)
            _end(process, signal.SIGKILL)  # ranks that are left
            if code:
                self.failed += 1
                self.say(f"FAILED with {code}, see {self.errors.name}: {shown}")

    def _start(self, job: list[str], gpus: Sequence[str], lock: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, *job]
        if job[0].endswith("bench_engine.py"):
            command += ["--turn", str(lock)]
        else:
            command = ["flock", str(lock), *command]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        streams = {"stdout": self.lines, "stderr": self.errors}
        process = subprocess.Popen(command, **streams, env=environment, start_new_session=True)
        self._started.append(process)
        return process


def _end(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Sends a signal to a part and its ranks."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def memory() -> int:
    """MiB of a GPU."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, check=True, capture_output=True, text=True).stdout.split()[0])


def table(out: Path) -> None:
    """Prints what was measured: a table for each shape and number of GPUs, the floor first."""
    text = out.read_text().splitlines()
    for line in text:
        if line.startswith(("ok", "WRONG")) or "FAILED" in line or "left out" in line:
            print(line)
    found: dict[tuple[str, int], dict[str, dict[str, tuple[float, str]]]] = {}
    for row in (json.loads(each) for each in text if each.startswith("{")):
        if "value" not in row or "profile:" in row["what"]:
            continue
        variant, _, figure = row["what"].partition(" ")
        shape, *parts = variant.split("+")
        if row["engine"] == "arithmetic":
            way, _, figure = figure.partition(" ")
            size = row["gpus"]
        else:
            size = next((int(part[2:]) for part in parts if part.startswith("tp")), 1)
            dispatch = next((part for part in parts if part.startswith("direct")), "dp")
            way = dispatch if "dp-attention" in parts else "ep" if "ep" in parts else "tp"
        found.setdefault((shape, size), {}).setdefault(way, {})[figure] = row["value"], row["unit"]
    for (shape, size), ways in found.items():
        units = {figure: unit for rows in ways.values() for figure, (_, unit) in rows.items()}
        print(f"\n| {shape} over {size} | unit |", " | ".join(ways), "|")
        print("|---" * (2 + len(ways)) + "|")
        for figure, unit in units.items():
            cells = [f"{rows[figure][0]:.4g}" if figure in rows else "" for rows in ways.values()]
            print(f"| {figure} | {unit} |", " | ".join(cells), "|")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.jsonl")
    parser.add_argument("--gpus", type=int, default=4, help="Of this machine (default: 4).")
    parser.add_argument("--sizes", default="4,2", help="How many to split over (default: 4,2).")
    parser.add_argument("--shapes", default=f"{QWEN},{DEEPSEEK}", help="Which (default: both).")
    parser.add_argument("--ways", default=",".join(FLAGS), help="Which (default: %(default)s).")
    parser.add_argument("--layers", type=int, default=0, help="Of DeepSeek-V3 (default: as many as fit).")
    parser.add_argument(
        "--tuning", type=float, default=0.0, help="Seconds to measure experts' tiles in (default: none)."
    )
    parser.add_argument("--profile", type=Path, help="Folder for traces; also prints steps' time by part.")
    parser.add_argument("--quick", action="store_true", help="Decodes only, with graphs of their sizes only.")
    parser.add_argument("--no-check", dest="check", action="store_false", help="Leave out whether answers are right.")
    parser.add_argument(
        "--budget", type=float, default=250.0, help="Seconds after which no part begins (default: 250)."
    )
    parser.add_argument("--limit", type=float, default=80.0, help="Seconds of a part (default: 80).")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only to try it.")
    parser.add_argument(
        "--diverging-rank", type=int, default=-1, help="As bench_engine.py has it: all parts must fail."
    )
    parser.add_argument("--table", action="store_true", help="Only print the table of what is in OUT.")
    arguments = parser.parse_args()
    if unknown := (set(arguments.ways.split(",")) - set(FLAGS)) | (set(arguments.shapes.split(",")) - {QWEN, DEEPSEEK}):
        parser.error(f"--ways, --shapes: {', '.join(sorted(unknown))}")
    if max(map(int, arguments.sizes.split(","))) > arguments.gpus:
        parser.error("--sizes: more than --gpus")
    failed = 0
    if not arguments.table:
        with (
            tempfile.TemporaryDirectory() as folder,
            arguments.out.open("a") as lines,
            arguments.out.with_suffix(".err").open("a") as errors,
        ):
            machine = Machine(arguments, Path(folder), lines, errors)
            signal.signal(signal.SIGTERM, machine.stop)
            machine.run_all()
            failed = machine.failed
    table(arguments.out)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
