"""Wheel and sdist: what PyPI asks of them, and that a stranger can install them, on every Python that Sapwood is for.

Everything lies in one temporary folder, caches included. A Python that is not on this machine comes from Debian, where its
debootstrap is; what is not to be had is a test that is skipped and says why.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
DEBIAN = {"3.13": "trixie", "3.14": "forky"}
"""The releases of Debian that have a Python."""


class Tools(NamedTuple):
    """Where the programs are with which people build and install, and a home for them that is thrown away."""

    bin: Path
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """A newcomer's, but for how this machine reaches its package index."""
        index = {
            name: value
            for name, value in os.environ.items()
            if name.startswith(("PIP_", "UV_", "SSL_")) or "_proxy" in name
        }
        home = self.folder / "home"
        return index | {
            "HOME": str(home),
            "PATH": "/usr/bin:/bin",
            "UV_CACHE_DIR": str(home / "uv"),
            "UV_PYTHON_DOWNLOADS": "never",
        }

    def run(self, *command: object, fails: bool = False) -> str:
        """What a program prints, from outside the checkout; fails with it if the program does."""
        words = list(map(str, command))
        done = subprocess.run(
            words, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=900, check=False
        )
        assert (done.returncode != 0) == fails, (
            f"{words}: {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )
        return done.stderr if fails else done.stdout


class Built(NamedTuple):
    """The two files that a release uploads."""

    wheel: Path
    sdist: Path


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tools]:
    folder = tmp_path_factory.mktemp("installs")
    (folder / "home").mkdir()
    subprocess.run([sys.executable, "-m", "venv", folder / "tools"], check=True)
    found = Tools(folder / "tools/bin", folder)
    found.run(found.bin / "pip", "install", "-q", "--disable-pip-version-check", "build", "pipx", "twine", "uv")
    yield found
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def built(tools: Tools) -> Built:
    """Made as RELEASING.md says, of what git tracks: the sdist, and the wheel of the sdist."""
    source = tools.folder / "source"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip(f"a release is built of what git tracks: {listed.stderr.strip()}")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, source / name)
    dist = tools.folder / "dist"
    tools.run(tools.bin / "python", "-m", "build", "--installer", "uv", "--outdir", dist, source)
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    return Built(wheel, sdist)


class Machine(NamedTuple):
    """A Python, on this machine or in a Debian of its own.

    Attributes:
        before: What stands before a command line to run it there.
        root: Its file system.
        python: The interpreter's path there.
    """

    before: tuple[str, ...]
    root: Path
    python: str


def _here(tools: Tools, version: str) -> str | None:
    """An interpreter on this machine."""
    of_pyenv = sorted((Path.home() / ".pyenv/versions").glob(f"{version}.*/bin/python{version}"))
    if of_pyenv:
        return str(of_pyenv[-1])
    command = [str(tools.bin / "uv"), "python", "find", "--no-project", version]
    environment = tools.environment | {"PATH": os.environ["PATH"], "HOME": str(Path.home())}
    found = subprocess.run(command, cwd=tools.folder, env=environment, capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else None


@pytest.fixture(scope="module", params=VERSIONS)
def machine(request: pytest.FixtureRequest, tools: Tools) -> Iterator[Machine]:
    version: str = request.param
    if python := _here(tools, version):
        yield Machine((), Path("/"), python)
        return
    release = DEBIAN.get(version)
    if release is None or os.geteuid() != 0 or shutil.which("debootstrap") is None:
        pytest.skip(f"no Python {version} here, and no root with debootstrap to make a Debian that has it")
    root = tools.folder / release
    script = "/usr/share/debootstrap/scripts/sid"  # it is the same for all, and older packages know no newer release
    packages = "--include=python3-venv,ca-certificates"
    made = subprocess.run(
        ["debootstrap", "--variant=minbase", packages, release, root, "http://deb.debian.org/debian", script],
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    if made.returncode != 0:
        pytest.skip(f"no Python {version} here, and Debian {release} cannot be fetched: {made.stdout[-500:]}")
    for name in ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs/ca-certificates.crt"):
        shutil.copyfile(name, root / name[1:])
    yield Machine((shutil.which("chroot") or "/usr/sbin/chroot", str(root)), root, "/usr/bin/python3")
    shutil.rmtree(root, ignore_errors=True)


def _works(tools: Tools, command: tuple[object, ...], python: tuple[object, ...], built: Built) -> None:
    """What is installed runs, is not the checkout, and says what it lacks for more."""
    assert tools.run(*command, "--version") == f"sapwood {built.wheel.name.split('-')[1]}\n"
    assert tools.run(*command, "model", "list") == ""
    assert "# Models" in tools.run(*command, "docs", "models")
    refused = tools.run(*command, "run", "demo", "Hi!", fails=True)
    assert "pip install 'sapwood[all]'" in refused.splitlines()[-1]
    program = "import sapwood, sapwood_common, sapwood_net, sapwood_text, sapwood.client; print(sapwood.__file__)"
    assert str(ROOT) not in tools.run(*python, "-c", program)


def test_both_are_what_pypi_takes(tools: Tools, built: Built) -> None:
    tools.run(tools.bin / "twine", "check", "--strict", *built)


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_an_empty_environment_takes_it(kind: str, machine: Machine, tools: Tools, built: Built) -> None:
    file: Path = getattr(built, kind)
    environment = machine.root / str(tools.folder)[1:] / f"{kind}-{Path(machine.python).name}"
    there = f"/{environment.relative_to(machine.root)}"
    environment.parent.mkdir(parents=True, exist_ok=True)
    try:
        if not machine.before:  # uv builds an sdist once for all of them
            tools.run(tools.bin / "uv", "venv", "-q", "--python", machine.python, environment)
            tools.run(tools.bin / "uv", "pip", "install", "-q", "--python", environment / "bin/python", file)
        else:
            (environment.parent / "home").mkdir(exist_ok=True)
            copy = shutil.copyfile(file, environment.parent / file.name)
            tools.run(*machine.before, machine.python, "-m", "venv", there)
            tools.run(*machine.before, f"{there}/bin/pip", "install", "-q", f"/{copy.relative_to(machine.root)}")
        before = machine.before
        _works(tools, (*before, f"{there}/bin/sapwood"), (*before, f"{there}/bin/python"), built)
    finally:
        shutil.rmtree(environment, ignore_errors=True)


def test_uv_installs_it_as_a_tool(tools: Tools, built: Built) -> None:
    tools.run(tools.bin / "uv", "tool", "install", "-q", "--python", sys.executable, built.wheel)
    home = tools.folder / "home/.local"
    _works(tools, (home / "bin/sapwood",), (home / "share/uv/tools/sapwood/bin/python",), built)


def test_pipx_installs_it(tools: Tools, built: Built) -> None:
    tools.run(tools.bin / "pipx", "install", "--quiet", "--force", "--python", sys.executable, built.wheel)
    home = tools.folder / "home/.local"
    _works(tools, (home / "bin/sapwood",), (home / "share/pipx/venvs/sapwood/bin/python",), built)


@pytest.mark.parametrize("version", VERSIONS)
def test_packages_for_everything_exist_for_each_python(version: str, tools: Tools, built: Built) -> None:
    wanted = tools.folder / "all.in"
    wanted.write_text(f"sapwood[all] @ {built.wheel.as_uri()}\n")
    chosen = tools.run(tools.bin / "uv", "pip", "compile", "-q", "--python-version", version, wanted)
    assert {"torch", "grpcio", "aiohttp", "tokenizers", "rich"} <= {
        line.partition("==")[0] for line in chosen.splitlines()
    }
