"""Prints the results of bench_engine.py beside the figures of vLLM 0.24.0 on the same kind of card.

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
            cells.append(str(VLLM[name][index]) if name in VLLM else "")
        print(f"| {name} | {unit} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
