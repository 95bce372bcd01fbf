"""`sapwood top`: what keys do, and that a terminal is as it was afterwards."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import termios

from sapwood.cli.top import View, fit

ROWS = [("WORKER", "RUNNING", "PAGES"), ("b", "10", "9%"), ("a", "9", "-"), ("c", "2", "80%")]


def test_keys_sort_rows_by_value_and_turn_them_round() -> None:
    view = View(1.0)
    assert view.sorted(ROWS) == ROWS
    view.press("s")
    assert [row[0] for row in view.sorted(ROWS)] == ["WORKER^", "a", "b", "c"]
    view.press("s")
    assert [row[0] for row in view.sorted(ROWS)[1:]] == ["c", "a", "b"]
    view.press("r")
    assert [row[0] for row in view.sorted(ROWS)] == ["WORKER", "b", "a", "c"]
    view.press("s")
    assert [row[2] for row in view.sorted(ROWS)] == ["PAGESv", "-", "80%", "9%"]
    view.press("s")
    assert view.sorted(ROWS) == ROWS


def test_keys_pause_and_change_the_pace_within_its_bounds() -> None:
    view = View(1.0)
    for _ in range(20):
        view.press("+")
    assert view.interval == 0.1
    for _ in range(20):
        view.press("-")
    assert view.interval == 3600
    view.press(" ")
    view.press("x")
    assert (view.paused, view.over) == (True, False)
    view.press("q")
    assert view.over


def test_q_ends_it_and_the_terminal_is_as_it_was() -> None:
    program = """
import contextlib
from sapwood.cli import top
from sapwood.v1 import router_pb2
class Router:
    def GetStatus(self, request, timeout):
        return router_pb2.GetStatusResponse(policy="a policy")
import argparse
raise SystemExit(top.run(argparse.Namespace(interval=3600.0, once=False), lambda _: contextlib.nullcontext(Router())))
"""
    ours, its = pty.openpty()
    before = termios.tcgetattr(its)
    process = subprocess.Popen([sys.executable, "-c", program], stdin=its, stdout=its, stderr=its)
    seen = b""
    while b"? shows the keys" not in seen:
        seen += os.read(ours, 4096)
    os.write(ours, b"?q")
    assert process.wait(60) == 0
    assert b"a policy" in seen
    assert termios.tcgetattr(its) == before
    os.close(ours)
    os.close(its)


def test_what_is_shown_fits_into_the_window() -> None:
    lines = ["head " * 20, "", *(f"worker {index}" for index in range(50))]
    shown = fit(lines, ["", "hints"], os.terminal_size((40, 10)))
    assert len(shown) == 9
    assert max(map(len, shown)) == 40
    assert shown[-4:] == ["worker 3", "and 46 more, for which the window is too", "", "hints"]
    assert fit(lines[:7], ["", "hints"], os.terminal_size((200, 10))) == [*lines[:7], "", "hints"]
