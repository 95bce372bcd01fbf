"""`sapwood top` and `sapwood router top`: a router and its workers, live."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from sapwood_common.settings.flags import add_option

if TYPE_CHECKING:
    from sapwood.v1 import router_pb2, router_pb2_grpc

_CLEAR = "\x1b[H\x1b[J"
_OTHER_SCREEN, _OWN_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_TIMEOUT = 10.0

Connect = Callable[[argparse.Namespace], "AbstractContextManager[router_pb2_grpc.RouterStub]"]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's own flags."""
    add_option(
        parser,
        "--interval",
        "Seconds between two looks.",
        variable="SAPWOOD_TOP_INTERVAL",
        default=1.0,
        parse=_seconds,
        metavar="SECONDS",
    )
    parser.add_argument("--once", action="store_true", help="Look once and end. [default: until Ctrl-C]")


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not 0.1 to 3600")
    return value


def run(arguments: argparse.Namespace, connect: Connect) -> int:
    """Shows the router until Ctrl-C; without a terminal, prints one table after another."""
    from sapwood.v1 import router_pb2

    live = sys.stdout.isatty() and not arguments.once
    with connect(arguments) as router:
        try:
            if live:
                sys.stdout.write(_OTHER_SCREEN)
            while True:
                status = router.GetStatus(router_pb2.GetStatusRequest(), timeout=_TIMEOUT)
                sys.stdout.write((_CLEAR if live else "") + "\n".join(render(status)) + "\n")
                sys.stdout.flush()
                if arguments.once:
                    return 0
                time.sleep(arguments.interval)
        except KeyboardInterrupt:
            return 0
        finally:
            if live:
                sys.stdout.write(_OWN_SCREEN)
                sys.stdout.flush()


def render(status: router_pb2.GetStatusResponse) -> list[str]:
    """The lines of a view."""
    rate = sum(worker.tokens_per_second for worker in status.workers)
    head = (
        f"up {int(status.uptime_seconds)} s, policy {status.policy}: {status.running_requests} running, "
        f"{status.queued_requests} queued, {rate:.0f} tokens/s, {status.resumptions} streams resumed"
    )
    return [
        head,
        *([f"cannot serve: {status.problem}"] if status.problem else []),
        "",
        *table(worker_rows(status.workers)),
    ]


def worker_rows(workers: Sequence[router_pb2.WorkerStatus]) -> list[tuple[str, ...]]:
    """A table's head and a row for each worker.

    Where a worker has a second cache tier, HOST is the share of its pages in use, FROM HOST the share of prompt tokens since the
    start that were found there and not on the device, and FROM STORE the share of those that came from a store.
    """
    from sapwood.generation import role_name

    tiers = any(worker.load.host_num_pages for worker in workers)
    roles = any(role_name(worker.role) != "both" for worker in workers)
    rows: list[tuple[str, ...]] = [
        (
            *("WORKER", *(("ROLE",) if roles else ()), "STATE", "MODEL", "HERE", "RUNNING", "WAITING", "PAGES"),
            *(("HOST", "HIT RATE", "FROM HOST", "FROM STORE") if tiers else ("HIT RATE",)),
            *("BREAKER", "TOKENS/S", "ID"),
        )
    ]
    for worker in workers:
        load = worker.load
        state = f"down: {worker.problem}" if not worker.healthy else "draining" if worker.draining else "up"
        counts = (str(worker.in_flight), str(load.running_requests), str(load.waiting_requests))
        pages = _share(load.used_pages - load.evictable_pages, load.num_pages)
        hits = [_share(load.cached_tokens, load.prompt_tokens)]
        if tiers:
            below = (load.host_hit_tokens, load.storage_hit_tokens)
            hits = [_share(load.host_used_pages, load.host_num_pages), *hits]
            hits += [_share(tokens, load.prompt_tokens) for tokens in below]
        rate = f"{worker.tokens_per_second:.0f}"
        role = (role_name(worker.role),) if roles else ()
        rows.append(
            (
                worker.address,
                *role,
                state,
                worker.model or "-",
                *counts,
                pages,
                *hits,
                worker.breaker,
                rate,
                worker.id or "-",
            )
        )
    return rows


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines with columns as wide as they have to be."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
