"""Environments of other people's clients: each has its own, made once from PyPI and kept, for their dependencies conflict."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from sapwood_common.models.model_files import sapwood_home

MakeEnvironment = Callable[..., Path]


@pytest.fixture(scope="session")
def make_environment() -> MakeEnvironment:
    """Makes an environment with these requirements, or finds it; gives its ``bin`` folder.

    With ``shares`` it sees this environment's packages behind its own: torch and its like need not be there twice.
    """

    def make(*requirements: str, shares: bool = False) -> Path:
        key = hashlib.sha256("\0".join((sys.version, sys.prefix if shares else "", *requirements)).encode()).hexdigest()
        name = requirements[0].partition("==")[0]
        folder = sapwood_home() / "clients" / f"{name}-{key[:12]}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (folder.parent / "lock").open("w") as lock:  # another run may be at it
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "complete").exists():
                shutil.rmtree(folder, ignore_errors=True)
                subprocess.run([sys.executable, "-m", "venv", folder], check=True)
                if shares:
                    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
                    ours = sysconfig.get_path("purelib")
                    (folder / "lib" / version / "site-packages" / "shared.pth").write_text(f"{ours}\n")
                install = [folder / "bin" / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
                subprocess.run([*install, *requirements], check=True)
                (folder / "complete").touch()
        return folder / "bin"

    return make
