"""Users' programs pass `mypy --strict`, and mistakes in them do not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

RIGHT = """
import sapwood.lang as sl

@sl.function
async def program(s: sl.State, question: str) -> str:
    s += "Q: " + question + sl.gen("answer", 5, temperature=0, stop=["x"])
    forks = s.fork(2)
    forks += lambda i: f"{i}" + sl.select("x", ["a", "b"])
    forks.join()
    with s.user():
        s += "text"
    return str(await s.get("answer"))

state: sl.State = program.run("a", backend=sl.Sapwood())
text: str = state.text()
"""
WRONG = """
import sapwood.lang as sl

@sl.function
def program(s: sl.State) -> None:
    s += 5
    s += sl.gen("answer", temperature="hot")
    s += sl.gen("answer", temprature=0.5)
    sl.select("x", choices=3)
sl.Sapwod()
"""


def check(*files: Path) -> tuple[int, str]:
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--no-error-summary",
        "--config-file",
        "/dev/null",
        *map(str, files),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600, check=False)
    return done.returncode, done.stdout


@pytest.mark.slow
def test_users_programs_are_checked_strictly(tmp_path: Path) -> None:
    (tmp_path / "right.py").write_text(RIGHT)
    assert check(tmp_path / "right.py", *sorted((ROOT / "examples/programs").glob("*.py"))) == (0, "")
    (tmp_path / "wrong.py").write_text(WRONG)
    code, told = check(tmp_path / "wrong.py")
    assert code == 1 and [line.split(":")[1] for line in told.splitlines() if "error" in line] == [
        "6",
        "7",
        "8",
        "9",
        "10",
    ], told
