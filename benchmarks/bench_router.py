"""The router compared with smg, sglang-router and vllm-router: the same mock workers behind, in one run.

    make bench-router                      everything, ten minutes or so
    make bench-router ARGS='speed hits'    these parts only

speed     CPU time of the router's process a request and latencies: HTTP unary, HTTP streams of 32 chunks back to back and
          paced at 5 ms, and ours over gRPC; at concurrency 64 and 1
text      CPU time a token of router and tokenizer service together, with a real vocabulary, tools and reasoning; p99 of streams
          during calls of tools with 100 KB
memory    resident memory after 20 000 different prompts of 8 KB
hits      prefix-cache hit rate and load imbalance of cache_aware, easy and tight, five seeds
losses    throughput while 1 of 4 workers is stopped (SIGSTOP); time until a restarted one serves again
overload  p99 of quiet traffic during 5 000 idle streams, slow readers, vanishing clients, malformed requests, a 100 MB
          message and a flood of 50 times what the workers take

With ``--beside FOLDER`` speed and text show what changed since the commit that is checked out there: both routers are in front of
the same workers, and take turns.

The mock workers (``router_load/mock_worker.py``) speak HTTP to the peers and gRPC to ours. CPU times are those of the router's
process alone, from /proc. The peers are installed from PyPI into ``benchmarks/.peers``; one that cannot be is left out.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from report import Figure, Goal, draw, print_figures, print_table
from router_load import hits, losses, memory, overload, speed, texts
from router_load.engines import OURS, install_peers

Part = Callable[[list[str], Path, float], tuple[list[Figure], list[Goal]]]

PARTS: dict[str, Part] = {
    "speed": speed.measure,
    "text": texts.measure,
    "memory": memory.measure,
    "hits": hits.measure,
    "losses": losses.measure,
    "overload": overload.measure,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[], help="what to measure; all if none")
    parser.add_argument("--no-peers", action="store_true", help="ours alone")
    parser.add_argument(
        "--beside", type=Path, help="another checkout, with its own .venv: its router too (speed, text)"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="share of the usual number of requests")
    parser.add_argument("--logs", type=Path, help="folder for the processes' logs; a temporary one if not given")
    parser.add_argument("--plot", help="PNG file to draw the speeds into")
    args = parser.parse_args()
    engines = [OURS] if args.no_peers else [OURS, *install_peers()]
    beside = [] if args.beside is None else [str(args.beside.resolve())]
    folder = args.logs or Path(tempfile.mkdtemp(prefix="bench-router-"))
    folder.mkdir(parents=True, exist_ok=True)
    figures: list[Figure] = []
    goals: list[Goal] = []
    for part in args.parts or PARTS:
        print(f"{part} ...", file=sys.stderr)
        found, aims = PARTS[part](engines + beside if part in ("speed", "text") else engines, folder, args.scale)
        figures += found
        goals += aims
    print_figures(figures)
    print_table(figures, goals)
    if args.plot:
        draw(figures, "Router", args.plot)


if __name__ == "__main__":
    main()
