"""A model over the GPUs of this machine, in one command: whether answers are those of one GPU, what sums take, Llama 3.1 8B's
shape over 1, 2, 4 of them and Llama 3.3 70B's over 4; then a table beside floor, vLLM and target.

Each part is a process with a time limit of its own; one that fails is named, and the others go on. JSON lines go to OUT. In each
step all ranks have sampled the same tokens, or the part fails.

    python benchmarks/gpu/several_gpus.py OUT.jsonl                            # 4 GPUs
    python benchmarks/gpu/several_gpus.py OUT.jsonl --parts check,sums         # some of it
    python benchmarks/gpu/several_gpus.py OUT.jsonl --table                    # only the table
    python benchmarks/gpu/several_gpus.py OUT.jsonl --device cpu --gpus 2      # tries it, with tiny shapes
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
PARTS = ("check", "sums", "8b", "70b", "profile")
SMALL, LARGE = "llama-3.1-8b", "llama-3.3-70b"
TINY = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 32, "vocab_size": 100096,
}  # fmt: skip
# Of the 70B over 4 GPUs. Figure -> what GPUs could do at best, what vLLM 0.24 does on four H200, what is to be reached.
KNOWN = {
    "decode 1 steady": (9.0, 12.4, 10.0),
    "decode 8 steady": (9.3, 13.0, 10.6),
    "decode 64 steady": (11.5, 16.0, 13.0),
    "decode 256 steady": (21.0, 30.3, 24.0),
    "prefill 1x1024": (None, 81.0, 62.0),
    "prefill 1x8192": (410.0, 581.0, 490.0),
    "start-up": (None, 244.0, 60.0),
}


@dataclass(frozen=True)
class Machine:
    """Args: device: cuda or cpu; gpus: ranks at most; models: the folder with the shapes; traces: where profiles go."""

    device: str
    gpus: int
    models: Path
    traces: Path

    def engine(self, model: str, ranks: int, batches: str, prefills: str, *flags: str) -> list[str]:
        """What measures a shape over so many ranks."""
        common = ["--model", str(self.models / model), "--tensor-parallel", str(ranks), "--device", self.device]
        if self.device == "cpu":
            sizes = ["--kv-gb", "0.2", "--batches", "1,4", "--prefills", "1x600"]
        else:
            sizes = ["--kv-gb", "0", "--batches", batches, "--prefills", prefills]
        return [str(HERE / "bench_engine.py"), *common, "--only", "steady,prefill", *sizes, *flags]

    def commands(self, parts: set[str]) -> Iterator[list[str]]:
        """What is to be run."""
        sizes = [size for size in (2, 4) if size <= self.gpus]
        names = ",".join(map(str, sizes))
        stages = ["1x2"] + ["2x2"] * (self.gpus >= 4)
        if "check" in parts:
            check = ["--sizes", ",".join([*map(str, sizes), *stages]), "--device", self.device]
            yield [str(HERE / "check_tensor_parallel.py"), *check]
        if "sums" in parts:
            yield [str(HERE / "bench_sums.py"), "--sizes", names, "--device", self.device]
        wanted = "1,8,64,256", "1x1024,1x8192"
        if "8b" in parts:
            for size in [1, *sizes]:
                yield self.engine(SMALL, size, *wanted)
            yield self.engine(SMALL, sizes[-1], *wanted, "--all-reduce", "backend")
        if "70b" in parts:
            yield self.engine(LARGE, sizes[-1], *wanted)
        if "profile" in parts and self.device == "cuda":  # where the time goes, by kernel
            yield self.engine(LARGE, sizes[-1], "1,64", "1x8192", "--profile", str(self.traces))


def run(machine: Machine, parts: set[str], out: Path, limit: float) -> int:
    """Runs the parts; returns how many failed."""
    failed, began = 0, time.monotonic()
    with out.open("a") as lines, out.with_suffix(".err").open("a") as errors:
        for command in machine.commands(parts):
            said = f"# {time.monotonic() - began:.0f} s: {' '.join([Path(command[0]).name, *command[1:]])}"
            print(said, flush=True)
            print(said, file=lines, flush=True)
            try:
                done = subprocess.run(
                    [sys.executable, *command], stdout=lines, stderr=errors, timeout=limit, check=False
                )
                code = done.returncode
            except subprocess.TimeoutExpired:
                code = 124
            if code:
                failed += 1
                print(f"# FAILED with {code}: see {errors.name}", flush=True)
    print(f"# {time.monotonic() - began:.0f} s", flush=True)
    return failed


def table(out: Path) -> None:
    """Prints what was measured."""
    text = out.read_text().splitlines()
    for line in text:
        if line.startswith(("ok", "WRONG")) or '"chosen"' in line:
            print(line)
    rows = {row["what"]: row for row in (json.loads(each) for each in text if each.startswith("{")) if "value" in row}
    variants = list(dict.fromkeys(what.split(" ", 1)[0] for what in rows))
    figures = list(dict.fromkeys(what.split(" ", 1)[1] for what in rows if "profile:" not in what))
    print("\n| figure | unit |", " | ".join(variants), "| 70B over 4: floor | vLLM 0.24 | target |")
    print("|---" * (5 + len(variants)) + "|")
    for figure in figures:
        found = [rows.get(f"{variant} {figure}") for variant in variants]
        unit = next(row["unit"] for row in found if row is not None)
        cells = ["" if row is None else f"{row['value']:.4g}" for row in found]
        known = ["" if each is None else f"{each:g}" for each in KNOWN.get(figure, (None, None, None))]
        print(f"| {figure} | {unit} |", " | ".join([*cells, *known]), "|")
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
            machine = Machine(arguments.device, arguments.gpus, models, arguments.out.with_suffix(".traces"))
            failed = run(machine, set(arguments.parts.split(",")), arguments.out, arguments.limit)
    table(arguments.out)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
