"""Child processes: their lines, their addresses, their end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sapwood.cli.local.child import Child
from sapwood.cli.local.cluster import DiedError
from sapwood.cli.main import main
from sapwood_testing.ports import port_of_its_own


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], object]:
    """Sets the program of a module `stand_in` that can be started."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return (tmp_path / "stand_in.py").write_text


async def test_addresses_are_read_from_the_log(stand_in: Callable[[str], object]) -> None:
    stand_in(
        "import sys\n"
        "print('12:00:00.000 INFO router [-] gRPC listening on 127.0.0.1:1001', file=sys.stderr)\n"
        "print('12:00:00.000 INFO router [-] HTTP listening on http://127.0.0.1:1002')\n"
        "print(*sys.argv[1:])\n"
    )
    lines: list[tuple[str, str]] = []
    child = await Child.start("it", "stand_in", ["--flag", "x y"], lambda name, line: lines.append((name, line)))
    assert await child.address("gRPC") == "127.0.0.1:1001"
    assert await child.address("HTTP") == "127.0.0.1:1002"
    assert await child.address("other") is None
    assert child.exit_code == 0
    assert lines[-1] == ("it", "--flag x y")


async def test_a_death_is_told_with_exit_code_and_last_lines(stand_in: Callable[[str], object]) -> None:
    stand_in("for n in range(100): print('line', n)\nraise SystemExit(7)\n")
    child = await Child.start("it", "stand_in", [], lambda name, line: None)
    assert await child.address() is None
    message = str(DiedError(child))
    assert message.startswith("it ended with exit code 7; its last lines:\n  line 80\n")
    assert message.endswith("\n  line 99")


async def test_a_line_without_end_does_not_stop_the_reader(stand_in: Callable[[str], object]) -> None:
    stand_in("print('x' * 300_000)\nprint('after')\n")
    child = await Child.start("it", "stand_in", [], lambda name, line: None)
    await child.exited.wait()
    assert child.last_lines[-1] == "after"


async def test_kill_takes_the_whole_group(stand_in: Callable[[str], object]) -> None:
    stand_in(
        "import subprocess, sys, time\n"
        "grandchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(grandchild.pid)\n"
        "time.sleep(600)\n"
    )
    pids: list[int] = []
    child = await Child.start("it", "stand_in", [], lambda name, line: pids.append(int(line)))
    while not pids:
        await asyncio.sleep(0.01)
    child.kill()
    await asyncio.wait_for(child.exited.wait(), 60)
    assert child.exit_code == -signal.SIGKILL
    assert str(DiedError(child)).startswith("it was killed by SIGKILL")
    assert _ends(pids[0])


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is needed")
def test_a_service_does_not_outlive_a_killed_parent(stand_in: Callable[[str], object]) -> None:
    stand_in("import os, time\nprint('pid', os.getpid(), flush=True)\ntime.sleep(600)\n")
    parent = "import subprocess, sys\nsubprocess.run([sys.executable, '-m', 'sapwood.cli.local.tied', 'stand_in'])\n"
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline().split()[1])
        process.kill()
        assert _ends(pid)


def _ends(pid: int) -> bool:
    """Whether a process that is not ours to wait for is gone, or a zombie, before long."""
    for _ in range(6000):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
            os.kill(pid, 0)
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("flag", ["--port", "--http-port", "--tokenizer-port", "--worker-port"])
def test_up_names_the_flag_of_a_port_in_use(taken_port: int, capsys: pytest.CaptureFixture[str], flag: str) -> None:
    assert main(["up", "--ports", "auto", flag, str(taken_port)]) == 1
    assert f"cannot listen on 127.0.0.1:{taken_port}" in (shown := capsys.readouterr().err)
    assert f"with {flag}, or" in shown


def test_up_refuses_one_port_for_two_purposes(capsys: pytest.CaptureFixture[str]) -> None:
    port = str(port_of_its_own())
    assert main(["up", "--port", port, "--http-port", port]) == 2
    assert "--http-port and --port both mean" in capsys.readouterr().err


def test_up_refuses_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--ports", "auto", "--model", "/nowhere/model.gguf"]) == 2
    assert "/nowhere/model.gguf" in capsys.readouterr().err
