"""Folders of sockets: those of killed processes go, those of living ones stay."""

import subprocess
import sys
from pathlib import Path

import pytest

from sapwood_common.network.socket_folder import SocketFolder

HOLD = """
import sys
from pathlib import Path
from sapwood_common.network.socket_folder import SocketFolder
folder = SocketFolder("sapwood-test-", Path(sys.argv[1]))
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def hold(tmp_path):
    """Starts a process with a folder; gives both."""
    processes: list[subprocess.Popen] = []

    def start() -> tuple[subprocess.Popen, Path]:
        command = [sys.executable, "-c", HOLD, str(tmp_path)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        return process, Path(process.stdout.readline().strip())

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_the_next_one_removes_what_a_killed_process_left_and_nothing_else(tmp_path, hold) -> None:
    strange = tmp_path / "sapwood-test-unlocked"
    strange.mkdir()
    killed, left = hold()
    _, living = hold()
    (left / "socket").touch()
    assert left.is_dir()
    killed.kill()
    killed.wait()
    folder = SocketFolder("sapwood-test-", tmp_path)
    assert not left.exists()
    assert living.is_dir() and strange.is_dir() and folder.path.is_dir()
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.remove()
    assert not folder.path.exists()
