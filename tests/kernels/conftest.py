"""Triton's kernels run on the GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    # Read when a kernel's module is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def two_ranks(tmp_path: Path) -> Callable[[str, int], list[list[str]]]:
    """Runs a program in two processes, whose arguments are a folder and their rank; returns the words that each printed.

    In the folder is a file of so many zero bytes for each rank, named after it: memory that both can reach.
    """

    def run(program: str, num_bytes: int) -> list[list[str]]:
        for rank in range(2):
            (tmp_path / str(rank)).write_bytes(bytes(num_bytes))
        commands = [[sys.executable, "-c", program, str(tmp_path), str(rank)] for rank in range(2)]
        environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        started = [subprocess.Popen(each, env=environment, stdout=subprocess.PIPE, text=True) for each in commands]
        try:
            return [each.communicate(timeout=200)[0].split() for each in started]
        finally:
            for each in started:
                each.kill()
                each.wait()

    return run


@pytest.fixture
def lines_of_compiler() -> Callable[[str], list[list[str]]]:
    """Runs a program in which Triton compiles for a GPU that is not here; returns the words of each line that it printed."""

    def run(program: str) -> list[list[str]]:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return [line.split() for line in done.stdout.splitlines()]

    return run
