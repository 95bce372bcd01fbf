"""Runs a simulation against the worker with one line changed: it is worth something only if it then fails."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import sapwood_worker


class Mutation(NamedTuple):
    """A line of the worker, and what it becomes.

    Attributes:
        file: Its path inside the package.
        line: Text that occurs there once.
        wrong: What stands there instead.
    """

    file: str
    line: str
    wrong: str

    @property
    def title(self) -> str:
        """A name for tests."""
        return f"{self.file}: {self.line.strip()}"


_RUN = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("simulation", sys.argv[1])
module = sys.modules["simulation"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.run_seeds(0, steps=int(sys.argv[2]))
"""


def simulate(
    simulation: Path, steps: int, folder: Path, mutation: Mutation | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs ``run_seeds(0, steps)`` of a test file with a copy of the worker's package in ``folder``, changed or not.

    Raises:
        AssertionError: The line is not in the file, or not once.
    """
    shutil.copytree(Path(sapwood_worker.__file__).parent, folder / "sapwood_worker")
    if mutation is not None:
        path = folder / "sapwood_worker" / mutation.file
        source = path.read_text()
        assert source.count(mutation.line) == 1, "the line is not there any more"
        path.write_text(source.replace(mutation.line, mutation.wrong))
    return subprocess.run(
        [sys.executable, "-c", _RUN, str(simulation), str(steps)],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
    )


def check_noticed(simulation: Path, steps: int, folder: Path, mutation: Mutation) -> None:
    """Asserts that the simulation fails with the line changed, and names the seed with which it does."""
    done = simulate(simulation, steps, folder, mutation)
    assert done.returncode == 1, done.stdout
    assert "seed " in done.stderr
