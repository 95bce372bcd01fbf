"""Prints the results of bench_engine.py and bench_serving.py next to the figures of vLLM 0.24.0 on the same kind of card.

python benchmarks/gpu/table.py benchmarks/results/FILE.jsonl
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

MODELS = ("qwen3-0.6b", "llama-3.1-8b")
PROFILE = " profile: "
# Figure -> vLLM's for the two models.
VLLM = {
    "start-up": (119, 43),
    "offline256": (23_550, 9_995),
    "decode 1": (1.73, 4.99),
    "decode 64": (3.72, 7.75),
    "decode 256": (10.6, 18.4),
    "prefill 1x8192": (35.7, 214.7),
    "prefill 16x8192 rate": (267_800, 37_900),
}
# The same of `vllm serve`, by HTTP; ours by either protocol stands next to it.
VLLM_SERVE = {
    "offline256": (23_700, 9_950),
    "offline256 TTFT p50": (370, 2_000),
    "offline256 inter-token p50": (6.3, 12.9),
    "offline256 inter-token p99": (23, 189),
    "one 1024 TTFT": (16, 28),
    "one 1024 inter-token": (1.63, 4.92),
    "poisson cached TTFT p50": (11.6, 19.1),
    "poisson cached TTFT p99": (18.2, 25.4),
    "poisson cached inter-token p50": (1.92, 5.5),
    "poisson cached inter-token p99": (5.0, 7.2),
}


def vllm(name: str) -> tuple[float, float] | None:
    """vLLM's figures for a row, if they are known."""
    for protocol in (" gRPC", " HTTP"):
        if protocol in name:
            return VLLM_SERVE.get(name.replace(protocol, ""))
    return VLLM.get(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, metavar="FILE.jsonl")
    rows = [json.loads(line) for line in parser.parse_args().results.read_text().splitlines() if line.startswith("{")]
    found = {(row["what"], row["overlap"]): row for row in rows if "value" in row and PROFILE not in row["what"]}
    names = dict.fromkeys(what.split(" ", 1)[1] for what, _ in found if what.split(" ", 1)[0] in MODELS)
    print("| figure | unit | 0.6B | step by step | vLLM | 8B | step by step | vLLM |")
    print("|---|---|---|---|---|---|---|---|")
    for name in names:
        cells, unit = [], ""
        for index, model in enumerate(MODELS):
            for overlap in (True, False):
                row = found.get((f"{model} {name}", overlap))
                cells.append("" if row is None else number(row["value"]))
                unit = unit if row is None else row["unit"]
            theirs = vllm(name)
            cells.append("" if theirs is None else str(theirs[index]))
        print(f"| {name} | {unit} | " + " | ".join(cells) + " |")
    print_float8(found)
    print_profile([row for row in rows if PROFILE in row.get("what", "")])


def number(value: float) -> str:
    """In four digits."""
    return f"{value:.4g}" if value < 1000 else f"{value:.0f}"


def print_float8(found: dict[tuple[str, bool], dict[str, Any]]) -> None:
    """The variants of the models, each next to the plain one."""
    variants = [what.split(" ", 1) for what, overlap in found if "+" in what.split(" ", 1)[0] and overlap]
    if variants:
        print("\n| float8 | figure | unit | bfloat16 | float8 |\n|---|---|---|---|---|")
    for variant, name in variants:
        row, plain = found[f"{variant} {name}", True], found.get((f"{variant.split('+')[0]} {name}", True))
        beside = "" if plain is None else number(plain["value"])
        print(f"| {variant} | {name} | {row['unit']} | {beside} | {number(row['value'])} |")


def print_profile(rows: list[dict[str, Any]]) -> None:
    """Where the device's time goes: a column for each step that was recorded."""
    if not rows:
        return
    times: dict[str, dict[str, float]] = {}
    for row in rows:
        step, part = row["what"].split(PROFILE)
        times.setdefault(step, {})[part] = row["value"]
    parts = dict.fromkeys(part for each in times.values() for part in each)
    print("\n| us | " + " | ".join(times) + " |\n|---|" + "---|" * len(times))
    for part in parts:
        print(
            f"| {part} | " + " | ".join(f"{each[part]:.0f}" if part in each else "" for each in times.values()) + " |"
        )


if __name__ == "__main__":
    main()
