"""From the results of bench_page_copies.py the options of bench_tiers.py: the ways of moving pages that serve best.

python benchmarks/gpu/choose_copies.py benchmarks/results/FILE.jsonl

A load is waited for: the fastest. A store is not: among those at 70 % of the fastest, the one that slows computation the least.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    rows = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines() if line.startswith("{")]
    found = {row["what"]: row["value"] for row in rows if "value" in row}
    ways: dict[str, dict[str, float]] = {"load": {}, "store": {}}
    for what, value in found.items():
        direction, _, way = what.partition(", ")
        if direction in ways and found.get(f"{what}: right") == 1.0:
            ways[direction][way] = value
    if not all(ways.values()):
        return
    load = max(ways["load"], key=lambda way: ways["load"][way])
    fastest = max(ways["store"].values())
    quick = [way for way, rate in ways["store"].items() if rate >= 0.7 * fastest]
    store = min(quick, key=lambda way: found[f"store, {way}: matrix products beside it"])
    print("--load", option(load), "--store", option(store))


def option(way: str) -> str:
    """As bench_tiers.py spells it."""
    return {"batch": "batch", "gather and batch": "staged"}.get(way) or way.split()[2]


if __name__ == "__main__":
    main()
