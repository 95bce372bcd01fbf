"""Compiles the library, once for each kind of processor that it may run on. Needs nothing but a C compiler.

``hatch_build.py`` runs this when Sapwood is installed, and by hand.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).parent
_NAMES = (
    "products.c",
    "replay.c",
    "signals.c",
    "steps.c",
    "strips.c",
    "tiles.c",
    "blocks.h",
    "rows.h",
    "strips.h",
    "vectors.h",
)
SOURCES = tuple(FOLDER / name for name in _NAMES)
_STEM = "sapwood"
_FLAGS = (
    "-O3",
    "-std=gnu11",
    "-shared",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
    "-Werror=implicit",
)
_X86: Mapping[str, tuple[str, ...]] = {"AVX512": ("-march=x86-64-v4", "-mavx512vnni"), "AVX2": ("-march=x86-64-v3",)}
_ARM: Mapping[str, tuple[str, ...]] = {"DEFAULT": ("-march=armv8.2-a+fp16",)}


def library_name(capability: str) -> str:
    """The library's file name for a kind of processor; another one whenever a source changes."""
    sources = b"".join(source.read_bytes() for source in SOURCES)
    return f"{_STEM}.{hashlib.sha256(sources).hexdigest()[:8]}.{capability}.so"


def find_compiler() -> list[str] | None:
    """The command of a C compiler: ``CC``, the system's, or the one in the package ziglang; None: there is none."""
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and shutil.which(name):
            return [name]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-P", "-m", "ziglang", "cc"]
    return None


def compile_libraries(folder: Path = FOLDER) -> list[Path]:
    """Compiles into ``folder`` what this kind of machine can run; returns the libraries.

    Raises:
        FileNotFoundError: There is no compiler.
        subprocess.CalledProcessError: It refused a source; its message is on standard error.
    """
    compiler = find_compiler()
    if compiler is None:
        raise FileNotFoundError("no C compiler: neither cc, gcc, clang nor the package ziglang is installed")
    targets = {"x86_64": _X86, "aarch64": _ARM, "arm64": _ARM}.get(platform.machine(), {})
    sources = [str(source) for source in SOURCES if source.suffix == ".c"]
    with tempfile.TemporaryDirectory() as cache:
        places = {"ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache}

        def compile_one(capability: str) -> Path:
            # Another process may be doing the same.
            fresh = (folder / library_name(capability)).with_suffix(f".{os.getpid()}")
            flags = targets[capability]
            if "ziglang" in compiler:
                flags = tuple(flag.replace("x86-64-v", "x86_64_v") for flag in flags)  # zig's own spelling
            command = [*compiler, *_FLAGS, *flags, "-o", str(fresh), *sources, "-lm"]
            subprocess.run(command, check=True, env={**os.environ, **places})
            return fresh

        with ThreadPoolExecutor() as pool:  # side by side: each takes a quarter of a minute and more
            made = [fresh.replace(fresh.with_suffix(".so")) for fresh in list(pool.map(compile_one, targets))]
    for old in set(folder.glob(f"{_STEM}.*.so")) - set(made):
        old.unlink(missing_ok=True)
    return made
