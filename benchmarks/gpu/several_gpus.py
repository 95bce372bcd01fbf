"""A model over the GPUs of this machine, in one command: whether answers are those of one GPU, what sums take, Llama 3.1 8B's
shape over 1, 2, 4 of them and Llama 3.3 70B's over 4; then a table next to floor, vLLM and target.

Each part is a process with a time limit of its own; one that fails is named, and the others continue. Parts that leave GPUs free
run side by side. FlashInfer's libraries are compiled along with the first ones; the 70B starts as a worker does, with none of
Triton's kernels compiled. JSON lines go to OUT. In each step all ranks have sampled the same tokens, or the part fails.

    python benchmarks/gpu/several_gpus.py OUT.jsonl                            # 4 GPUs
    python benchmarks/gpu/several_gpus.py OUT.jsonl --parts check,sums         # some of it
    python benchmarks/gpu/several_gpus.py OUT.jsonl --table                    # only the table
    python benchmarks/gpu/several_gpus.py OUT.jsonl --device cpu --gpus 2      # tries it, with tiny shapes
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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
PARTS = ("check", "sums", "8b", "70b", "profile")
SMALL, LARGE = "llama-3.1-8b", "llama-3.3-70b"
TINY = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 32, "vocab_size": 100096,
}  # fmt: skip
# Of the 70B over 4 GPUs. Figure -> what H200s could do at best, what vLLM 0.24 does on four H200, what is to be reached there.
KNOWN = {
    "decode 1 steady": (9.0, 12.4, 10.0),
    "decode 8 steady": (9.3, 13.0, 10.6),
    "decode 64 steady": (11.5, 16.0, 13.0),
    "decode 256 steady": (21.0, 30.3, 24.0),
    "prefill 1x1024": (None, 81.0, 62.0),
    "prefill 1x8192": (410.0, 581.0, 490.0),
    "start-up to first token": (None, 244.0, 60.0),
}
BANDWIDTH = {"H200": 4.3e12, "H100": 4.3e12 * 3.35 / 4.8}
"""Bytes a second that a card reads: what an H200 was measured at, and what its maker says of others next to it."""


@dataclass(frozen=True)
class Job:
    """Args: command: what Python runs; gpus: which of the machine's it may use; environment: what else it gets."""

    command: Sequence[str]
    gpus: Sequence[int]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Machine:
    """Args: device: cuda or cpu; gpus: ranks at most; models: the folder with the shapes; traces: where profiles go; cache: an
    empty folder."""

    device: str
    gpus: int
    models: Path
    traces: Path
    cache: Path

    def engine(self, model: str, ranks: int, batches: str, prefills: str, *flags: str) -> list[str]:
        """What measures a shape over so many ranks."""
        common = ["--model", str(self.models / model), "--tensor-parallel", str(ranks), "--device", self.device]
        if self.device == "cpu":
            sizes = ["--kv-gb", "0.2", "--batches", "1,4", "--prefills", "1x600"]
        else:
            sizes = ["--kv-gb", "0", "--batches", batches, "--prefills", prefills]
        return [str(HERE / "bench_engine.py"), *common, "--only", "steady,prefill", *sizes, *flags]

    def check(self, sizes: Sequence[str], gpus: Sequence[int]) -> Job:
        """What compares ranks with one GPU."""
        script = str(HERE / "checks" / "check_tensor_parallel.py")
        return Job([script, "--sizes", ",".join(sizes), "--device", self.device], gpus)

    def jobs(self, parts: set[str]) -> Iterator[list[Job]]:
        """What is to be run; what is in one list, side by side."""
        every, two = range(self.gpus), self.gpus >= 4
        sizes = [size for size in (2, 4) if size <= self.gpus]
        wanted = "1,8,64,256", "1x1024,1x8192"
        if "check" in parts:
            if two and self.device == "cuda":
                yield [self.check(["2"], range(2)), self.check(["1x2"], range(2, 4))]
                yield [self.check(["4", "2x2"], every)]
            else:
                yield [self.check([*map(str, sizes), "1x2", *["2x2"] * two], every)]
        if "sums" in parts:
            names = ",".join(map(str, sizes))
            yield [Job([str(HERE / "bench_sums.py"), "--sizes", names, "--device", self.device], every)]
        if "8b" in parts:
            alone = Job(self.engine(SMALL, 1, *wanted), [self.gpus - 1])
            pair = Job(self.engine(SMALL, 2, *wanted), range(2))
            yield from [[alone, pair]] if self.gpus > 2 and self.device == "cuda" else [[alone], [pair]]
            if two:
                yield [Job(self.engine(SMALL, 4, *wanted), every)]
            yield [Job(self.engine(SMALL, sizes[-1], *wanted, "--all-reduce", "backend"), every)]
        if "70b" in parts:
            flags = ["--as-a-worker"] if self.device == "cuda" else []
            empty = {"TRITON_CACHE_DIR": str(self.cache)}
            yield [Job(self.engine(LARGE, sizes[-1], *wanted, *flags), every, empty)]
        if "profile" in parts and self.device == "cuda":  # where the time goes, by kernel
            traced = self.engine(LARGE, sizes[-1], "1,8,64,256", "1x1024,1x8192", "--profile", str(self.traces))
            yield [Job(traced, every, {"TRITON_CACHE_DIR": str(self.cache)})]


class Runs:
    """Runs processes, each in a group of its own, of which nothing is left where it ends.

    Args:
        out: Where their lines go.
        limit: Seconds of each.
    """

    def __init__(self, out: Path, limit: float) -> None:
        self._out, self._limit = out, limit
        self._groups: set[int] = set()
        self.failed = 0
        self._began = time.monotonic()

    def say(self, what: str) -> None:
        """Prints what happens, and when."""
        said = f"# {time.monotonic() - self._began:.0f} s: {what}"
        print(said, flush=True)
        with self._out.open("a") as lines:
            print(said, file=lines)

    def run(self, job: Job) -> None:
        """Runs a process to its end; it adds to the lines."""
        named = " ".join([Path(job.command[0]).name, *job.command[1:]])
        self.say(f"{named} on {','.join(map(str, job.gpus))}")
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": visible(job.gpus)} | job.environment
        errors = self._out.with_suffix(".err")
        with self._out.open("a") as lines, errors.open("a") as said:
            process = subprocess.Popen(
                [sys.executable, *job.command], stdout=lines, stderr=said, env=environment, process_group=0
            )
            self._groups.add(process.pid)
            try:
                code = process.wait(self._limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGTERM)  # ranks leave their stacks
                with suppress(subprocess.TimeoutExpired):
                    process.wait(5)
                code = 124
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self._groups.discard(process.pid)
        if code:
            self.failed += 1
            self.say(f"FAILED with {code}: {named}: see {errors}")

    def end(self) -> None:
        """Ends what still runs."""
        for group in self._groups:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)


def visible(gpus: Sequence[int]) -> str:
    """Their names for a process, given those that this one may use."""
    mine = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = mine.split(",") if mine else [str(gpu) for gpu in range(max(gpus) + 1)]
    return ",".join(names[gpu] for gpu in gpus)


def run(machine: Machine, parts: set[str], out: Path, limit: float) -> int:
    """Runs the parts; returns how many failed."""
    runs = Runs(out, limit)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with ThreadPoolExecutor(3) as threads:
        try:
            if machine.device == "cuda" and parts & {"8b", "70b", "profile"}:
                libraries = Job([str(HERE / "build_libraries.py"), "--model", str(machine.models / SMALL)], [0])
                threads.submit(runs.run, libraries)
            for jobs in machine.jobs(parts):
                for each in [threads.submit(runs.run, job) for job in jobs]:
                    each.result()
        finally:
            runs.end()
    runs.say("the end")
    return runs.failed


def card_of(rows: Sequence[dict[str, str]]) -> str:
    """The card that was measured, as one of those whose floors are known; an H200 where none is said."""
    names = {row["device"] for row in rows if "device" in row}
    return next((card for card in BANDWIDTH for name in names if card in name), "H200")


def floor(bandwidth: float, requests: int) -> float:
    """Milliseconds of a decode of the 70B over 4 cards at best: weights or products, the keys of 1088 tokens, 160 sums."""
    weights, keys = 141.1e9 / 4, requests * 1088 * 327_680 / 4
    one_sum = 6e-6 if requests <= 16 else 12e-6 if requests <= 64 else 25e-6
    products = weights * requests / 780e12
    return 1e3 * (max(weights / bandwidth, products) + keys / bandwidth + 160 * one_sum)


def known(figure: str, card: str) -> tuple[float | None, float | None, float | None]:
    """Floor on such cards, what vLLM does on H200, and the target: as much above the floor as on H200."""
    best, vllm, target = KNOWN.get(figure, (None, None, None))
    if not figure.startswith("decode") or best is None or target is None:
        return best, vllm, target
    requests = int(figure.split()[1])
    ratio = floor(BANDWIDTH[card], requests) / floor(BANDWIDTH["H200"], requests)
    return best * ratio, vllm, target * ratio


def table(out: Path) -> None:
    """Prints what was measured."""
    text = out.read_text().splitlines()
    for line in text:
        if line.startswith(("ok", "WRONG")) or '"chosen"' in line:
            print(line)
    rows = {row["what"]: row for row in (json.loads(each) for each in text if each.startswith("{")) if "value" in row}
    card = card_of(list(rows.values()))
    variants = list(dict.fromkeys(what.split(" ", 1)[0] for what in rows))
    figures = list(dict.fromkeys(what.split(" ", 1)[1] for what in rows if "profile:" not in what))
    head = f"| 70B over 4: floor on {card} | vLLM 0.24 on H200 | target on {card} |"
    print("\n| figure | unit |", " | ".join(variants), head)
    print("|---" * (5 + len(variants)) + "|")
    for figure in figures:
        found = [rows.get(f"{variant} {figure}") for variant in variants]
        unit = next(row["unit"] for row in found if row is not None)
        cells = ["" if row is None else f"{row['value']:.4g}" for row in found]
        beside = ["" if each is None else f"{each:.3g}" for each in known(figure, card)]
        print(f"| {figure} | {unit} |", " | ".join([*cells, *beside]), "|")
    for what, row in rows.items():
        if "profile:" in what:
            print(f"{what}: {row['value']:.0f} us")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.jsonl")
    parser.add_argument("--parts", default=",".join(PARTS), help="Which (default: %(default)s).")
    parser.add_argument("--gpus", type=int, default=4, help="At most so many (default: 4).")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only to try it (default: cuda)."
    )
    parser.add_argument("--limit", type=float, default=580.0, help="Seconds of a part (default: 580).")
    parser.add_argument("--table", action="store_true", help="Only print the table of what is in OUT.")
    arguments = parser.parse_args()
    if arguments.gpus < 2 or set(arguments.parts.split(",")) - set(PARTS):
        parser.error(f"--gpus: at least 2; --parts: of {', '.join(PARTS)}")
    failed = 0
    if not arguments.table:
        with tempfile.TemporaryDirectory() as folder:
            models = HERE / "configs"
            if arguments.device == "cpu":
                shape = json.loads((models / SMALL / "config.json").read_text()) | TINY
                models = Path(folder)
                for name in (SMALL, LARGE):
                    (models / name).mkdir()
                    (models / name / "config.json").write_text(json.dumps(shape))
            traces, cache = arguments.out.with_suffix(".traces"), Path(folder) / "triton"
            machine = Machine(arguments.device, arguments.gpus, models, traces, cache)
            failed = run(machine, set(arguments.parts.split(",")), arguments.out, arguments.limit)
    table(arguments.out)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
