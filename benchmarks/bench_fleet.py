"""The router's policies, prefix index and admission against a thousand simulated workers, under a virtual clock.

    make bench-fleet                                       1000 workers, 10 million cached pages, 20 000 requests/s
    make bench-fleet ARGS='--workers 100 --pages 100000 --rate 1000'      seconds

Policies, indexes, registry, admission and the followers of KV events are the router's own; workers have true LRU caches and no
model. Every cache is full of pages that nobody asks for, and every router knows of all of them by its own copy of the workers'
KV events, before the first request comes. Requests go to the routers at random; a router knows of the others' only what workers
report. One policy after the other serves each workload:

shared    one of 200 system prompts of 1024 tokens, by Zipf's law, and 256 tokens of one's own
turns     conversations of five turns of 160 tokens over one of 20 system prompts of 512
agents    sessions of 30 turns of 2624 tokens over one of 4 system prompts of 2048, with pauses of 3 s on average
random    1024 tokens that nobody has in common

Prints a line of JSON for the fleet and one for each run, then a table. Times are CPU time of the one thread, in us a request:
hash (of the prompt's pages), select (target: p99 under 200 us), acquire (the policy learns of the placement), finish (and of the
answer). hit is the share of prompt pages found cached by the workers; imbalance is most over mean, of requests and of prefill
time; TTFT is virtual.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
from collections.abc import Mapping
from pathlib import Path

from fleet_sim.adapters import WAYS, Adapters, simulate
from fleet_sim.fleet import Fleet, Size
from fleet_sim.objectives import SCENARIOS
from fleet_sim.objectives import measure as simulate_objectives
from fleet_sim.worker import Speed
from fleet_sim.workloads import WORKLOADS
from gpu.commit import measured_commit
from report import cpu_name

from sapwood_router.routing.factory import PolicyParts, make_policy, policy_names
from sapwood_router.routing.index.blocks import ENTRY_BYTES, HOLDING_BYTES, BlockIndex

COLUMNS = {
    "workload": "workload", "policy": "policy", "hit_rate": "hit", "imbalance_requests": "imb. requests",
    "imbalance_prefill": "imb. prefill", "ttft_ms_p50": "TTFT p50 ms", "ttft_ms_p99": "p99", "refused": "refused",
    "select_us_p50": "select p50 us", "select_us_p99": "p99", "hash_us_p50": "hash p50", "acquire_us_p50": "acquire p50",
    "finish_us_p50": "finish p50", "event_us_a_page": "event us/page",
}  # fmt: skip


def events_first(policies: list[str]) -> list[str]:
    """Those that follow KV events come first: routers stop to follow them with the first that does not."""
    parts = PolicyParts(0, random.Random(), lambda: 0.0, BlockIndex(0))
    return sorted(policies, key=lambda name: not make_policy(name, parts).reads_events)


async def measure(args: argparse.Namespace) -> list[dict[str, float | str]]:
    pages = args.pages + args.workers * 1024  # what comes before what goes
    block_bytes = args.block_index_bytes or int(pages * (ENTRY_BYTES + HOLDING_BYTES))
    size = Size(
        args.workers,
        args.pages,
        args.page_size,
        args.routers,
        args.max_running,
        (args.cache_index_bytes, block_bytes),
    )
    speed = Speed(args.prefill_rate, args.decode_ms / 1e3, args.event_ms / 1e3)
    fleet = Fleet(size, speed, args.report_ms / 1e3)
    about = {"commit": measured_commit(), "device": f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores"}
    given = {"workers": args.workers, "routers": args.routers, "rate": args.rate, "seconds": args.seconds}
    rows: list[dict[str, float | str]] = [{"what": "fleet"} | given | fleet.fill() | about]
    show(rows[-1])
    for policy in events_first(args.policies):
        for workload in args.workloads:
            row = await fleet.run(WORKLOADS[workload], policy, args.rate, args.warm, args.seconds, args.seed)
            rows.append({"what": "run"} | row | given | about | {"load_average": round(os.getloadavg()[0], 1)})
            show(rows[-1])
    return rows


def show(row: Mapping[str, object]) -> None:
    print(json.dumps(row), flush=True)


def print_table(rows: list[dict[str, float | str]]) -> None:
    runs = sorted((row for row in rows if row["what"] == "run"), key=lambda row: str(row["workload"]))
    print(f"\n| {' | '.join(COLUMNS.values())} |\n|{'---|' * len(COLUMNS)}", file=sys.stderr)
    for row in runs:
        print(f"| {' | '.join(str(row[name]) for name in COLUMNS)} |", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--pages", type=int, default=10_000_000, help="pages that all workers together have cached")
    parser.add_argument("--page-size", type=int, default=16, help="tokens a page")
    parser.add_argument("--routers", type=int, default=2, help="routers that share the requests and hear all events")
    parser.add_argument("--rate", type=float, default=20_000, help="requests a second, of all routers together")
    parser.add_argument("--seconds", type=float, default=0.5, help="virtual seconds that count, of each run")
    parser.add_argument("--warm", type=float, default=0.3, help="virtual seconds before those")
    parser.add_argument("--max-running", type=int, default=64, help="requests that a worker says it runs at once")
    parser.add_argument("--prefill-rate", type=float, default=40_000, help="tokens a second that a worker prefills")
    parser.add_argument("--decode-ms", type=float, default=10, help="a token")
    parser.add_argument("--event-ms", type=float, default=5, help="until a KV event has reached the routers")
    parser.add_argument("--report-ms", type=float, default=100, help="between a worker's load reports")
    parser.add_argument("--cache-index-bytes", type=int, default=64 << 20, help="as the router's flag, and its default")
    parser.add_argument("--block-index-bytes", type=int, help="as the router's flag; room for all pages unless given")
    parser.add_argument("--policies", nargs="+", choices=policy_names(), default=list(policy_names()))
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument(
        "--loras",
        action="store_true",
        help="instead: 500 adapters asked for by Zipf's law over 50 workers of 32 slots, placed as the router places them and in "
        "two simpler ways",
    )
    parser.add_argument(
        "--objectives",
        action="store_true",
        help="instead: chats whose first token is to come within a second, on 8 workers; the router knows of that or does not",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="file for the lines of JSON, too")
    args = parser.parse_args()
    if args.loras:
        about = {"commit": measured_commit(), "device": cpu_name()}
        for way in WAYS:
            for warm in (30_000, 0):
                show({"what": "adapters", "warm": warm} | simulate(Adapters(), way, 60_000, warm, args.seed) | about)
        return
    if args.objectives:
        for scenario in SCENARIOS:
            for told in (False, True):
                row = asyncio.run(simulate_objectives(scenario, 8, args.warm, args.seconds, args.seed, told=told))
                show({"what": "objectives"} | row | {"commit": measured_commit()})
        return
    rows = asyncio.run(measure(args))
    if args.out is not None:
        args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print_table(rows)


if __name__ == "__main__":
    main()
