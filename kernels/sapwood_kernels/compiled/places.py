"""Where Triton and FlashInfer look for compiled kernels."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path


def triton_cache() -> Path:
    """Triton's cache."""
    given = os.environ.get("TRITON_CACHE_DIR")
    return Path(given) if given else Path.home() / ".triton" / "cache"


def flashinfer_folder() -> Path:
    """A folder of our own next to what FlashInfer compiles, for libraries that were compiled elsewhere."""
    return Path(os.environ.get("FLASHINFER_WORKSPACE_BASE", str(Path.home()))) / ".cache" / "flashinfer" / "sapwood"


def take_flashinfer_from(folder: Path) -> None:
    """Lets FlashInfer take the libraries of a folder, instead of compiling them, in this process. Does nothing where its package
    of compiled kernels is installed, which has them all."""
    if find_spec("flashinfer") is None or find_spec("flashinfer_jit_cache") is not None:
        return
    from flashinfer.jit import env

    env.FLASHINFER_AOT_DIR = folder
