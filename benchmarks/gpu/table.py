"""Prints the results of bench_engine.py and bench_serving.py beside the figures of vLLM 0.24.0 on the same kind of card.

python benchmarks/gpu/table.py benchmarks/results/FILE.jsonl
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

MODELS = ("qwen3-0.6b", "llama-3.1-8b")
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
# The same of `vllm serve`, by HTTP; ours by either protocol stands beside it.
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
    rows = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines() if line.startswith("{")]
    found = {(row["what"], row["overlap"]): row for row in rows if "value" in row}
    names = dict.fromkeys(what.split(" ", 1)[1] for what, _ in found)
    print("| figure | unit | 0.6B | step by step | vLLM | 8B | step by step | vLLM |")
    print("|---|---|---|---|---|---|---|---|")
    for name in names:
        cells, unit = [], ""
        for index, model in enumerate(MODELS):
            for overlap in (True, False):
                row = found.get((f"{model} {name}", overlap))
                cells.append(
                    "" if row is None else f"{row['value']:.4g}" if row["value"] < 1000 else f"{row['value']:.0f}"
                )
                unit = unit if row is None else row["unit"]
            theirs = vllm(name)
            cells.append("" if theirs is None else str(theirs[index]))
        print(f"| {name} | {unit} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
