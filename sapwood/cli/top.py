"""`sapwood top` and `sapwood router top`: a router and its workers, live."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sapwood.cli.terminal import one_line
from sapwood_common.settings.flags import add_option, number

if TYPE_CHECKING:
    from sapwood.v1 import router_pb2, router_pb2_grpc

_CLEAR = "\x1b[H\x1b[J"
_OTHER_SCREEN, _OWN_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_TIMEOUT = 10.0
_FASTEST, _SLOWEST = 0.1, 3600.0
"""Seconds between two looks."""

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
    value = number(text)
    if not _FASTEST <= value <= _SLOWEST:
        raise argparse.ArgumentTypeError(f"{text} is not 0.1 to 3600")
    return value


@dataclass(slots=True)
class View:
    """What keys change. ``column``: which one rows are sorted by, counted from 0; -1: as the router lists them.

    ``interval`` in seconds; ``over``: q was pressed.
    """

    interval: float
    column: int = -1
    downward: bool = False
    paused: bool = False
    helped: bool = False
    over: bool = False

    def press(self, key: str) -> None:
        """Does what a key stands for; others do nothing."""
        if key in ("q", "Q"):
            self.over = True
        elif key in (" ", "p"):
            self.paused = not self.paused
        elif key in ("s", ">"):
            self.column += 1
        elif key == "<":
            self.column = max(-1, self.column - 1)
        elif key == "r":
            self.downward = not self.downward
        elif key == "+":
            self.interval = max(_FASTEST, self.interval / 2)
        elif key == "-":
            self.interval = min(_SLOWEST, self.interval * 2)
        elif key in ("?", "h"):
            self.helped = not self.helped

    def sorted(self, rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
        """A table, its head first, with its rows in the order of the view; the head marks the column."""
        head, *body = rows
        if self.column >= len(head):
            self.column = -1
        if self.column < 0:
            return list(rows)
        body.sort(key=lambda row: _order(row[self.column]), reverse=self.downward)
        mark = "v" if self.downward else "^"
        return [(*head[: self.column], head[self.column] + mark, *head[self.column + 1 :]), *body]


def _order(cell: str) -> tuple[bool, float, str]:
    """Numbers and shares by their value, before texts."""
    try:
        return (False, float(cell.rstrip("%")), "")
    except ValueError:
        return (True, 0.0, cell)


def _no_key(seconds: float) -> str:
    time.sleep(seconds)
    return ""


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Reads keys of the terminal: a function that waits some seconds for them, and gives "" if there are none."""
    if not sys.stdin.isatty():
        yield _no_key
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)

    def wait(seconds: float) -> str:
        ready = select.select([sys.stdin], [], [], seconds)[0]
        return os.read(sys.stdin.fileno(), 64).decode(errors="replace") if ready else ""

    try:
        yield wait
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def run(arguments: argparse.Namespace, connect: Connect) -> int:
    """Shows the router until Ctrl-C or q; without a terminal, prints one table after another."""
    from sapwood.v1 import router_pb2

    live = sys.stdout.isatty() and not arguments.once
    view = View(arguments.interval)
    with connect(arguments) as router, contextlib.ExitStack() as stack:
        wait = stack.enter_context(_keys()) if live else _no_key
        try:
            if live:
                sys.stdout.write(_OTHER_SCREEN)
            status = router.GetStatus(router_pb2.GetStatusRequest(), timeout=_TIMEOUT)
            while not view.over:
                lines = render(status, view)
                if live:
                    lines = fit(lines, ["", *_hints(view)], shutil.get_terminal_size())
                sys.stdout.write((_CLEAR if live else "") + "\n".join(lines) + "\n")
                sys.stdout.flush()
                if arguments.once:
                    return 0
                if keys := wait(view.interval):
                    for key in keys:
                        view.press(key)
                elif not view.paused:
                    status = router.GetStatus(router_pb2.GetStatusRequest(), timeout=_TIMEOUT)
            return 0
        except KeyboardInterrupt:
            return 0
        finally:
            if live:
                sys.stdout.write(_OWN_SCREEN)
                sys.stdout.flush()


def fit(lines: Sequence[str], hints: Sequence[str], size: os.terminal_size) -> list[str]:
    """What a window has room for: the first lines and all hints, cut at its edge."""
    room = max(size.lines - len(hints) - 1, 1)  # the cursor stands in a line of its own
    if len(lines) > room:
        hidden = len(lines) - room + 1
        lines = [*lines[: room - 1], f"and {hidden} more, for which the window is too low"]
    return [line[: size.columns] for line in (*lines, *hints)]


def _hints(view: View) -> list[str]:
    state = f"paused; every {view.interval:g} s" if view.paused else f"every {view.interval:g} s"
    if not view.helped:
        return [f"{state}; ? shows the keys, q ends"]
    return [
        state,
        "s, > sort by the next column   < by the one before   r the other way round",
        "space pauses   + more often   - less often   ? hides this   q ends",
    ]


def render(status: router_pb2.GetStatusResponse, view: View | None = None) -> list[str]:
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
        *table(worker_rows(status.workers) if view is None else view.sorted(worker_rows(status.workers))),
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
    rows = [tuple(map(one_line, row)) for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
