"""Generates stubs and descriptor set in ``sapwood/v1`` from ``protos``: on install (hatchling calls it) and by ``make proto``.

It also compiles the CPU's kernels, on install with a compiler from PyPI if there is no other. Where that fails Sapwood works
without them, and says so.
"""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand: only generate() is needed
    BuildHookInterface = object  # type: ignore[assignment, misc]

ROOT = Path(__file__).resolve().parent


def generate(root: Path = ROOT) -> None:
    """Writes ``*_pb2.py``, ``*_pb2_grpc.py``, their type stubs and ``descriptors.binpb`` next to ``sapwood/v1/__init__.py``.

    The descriptor set is for programs that read no ``.proto`` files; it has the comments.

    Raises:
        subprocess.CalledProcessError: protoc refused a file; its message is on standard error.
    """
    protos = root / "protos"
    files = sorted(str(path.relative_to(protos)) for path in protos.glob("sapwood/v1/*.proto"))
    subprocess.run(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"-I{protos}",
            f"--python_out={root}",
            f"--pyi_out={root}",
            f"--grpc_python_out={root}",
            f"--mypy_grpc_out=quiet:{root}",
            f"--descriptor_set_out={root / 'sapwood/v1/descriptors.binpb'}",
            "--include_imports",
            "--include_source_info",
            *files,
        ],
        check=True,
        env=_environment_with_plugins(),
    )


def _environment_with_plugins() -> dict[str, str]:
    """The environment with the folder of ``protoc-gen-mypy_grpc`` on PATH (an isolated build's is not)."""
    import os
    import sysconfig

    import mypy_protobuf

    beside = Path(mypy_protobuf.__file__).resolve().parents[1]
    folders = [sysconfig.get_path("scripts"), str(beside.parent.parent.parent / "bin"), os.environ.get("PATH", "")]
    return {**os.environ, "PATH": os.pathsep.join(folders)}


def compile_kernels(root: Path = ROOT) -> list[Path]:
    """Compiles the sources in ``kernels/sapwood_kernels/native`` next to them; returns the libraries, none where that fails."""
    build = runpy.run_path(str(root / "kernels/sapwood_kernels/native/build.py"))
    try:
        made: list[Path] = build["compile_libraries"]()
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"GGUF weights will be widened as they are loaded, no kernel for them: {error}", file=sys.stderr)
        return []
    return made


def platform_of(libraries: Iterable[Path]) -> str:
    """The platform of a wheel with these libraries: on Linux by the youngest glibc whose functions they call (PEP 600)."""
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    system, _, machine = platform.partition("_")
    called = [each for path in libraries for each in re.findall(rb"GLIBC_(\d+)\.(\d+)", path.read_bytes())]
    if system != "linux" or not called:
        return platform
    major, minor = max((int(major), int(minor)) for major, minor in called)
    return f"manylinux_{major}_{max(minor, 17)}_{machine}"


class StubsHook(BuildHookInterface):  # type: ignore[type-arg, misc, unused-ignore]
    """Runs :func:`generate` before anything is put together, and for all but an sdist :func:`compile_kernels`."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """A compiler, for machines without one."""
        found = runpy.run_path(str(Path(self.root) / "kernels/sapwood_kernels/native/build.py"))["find_compiler"]()
        return [] if found else ["ziglang>=0.15,<0.17"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """See hatchling; pyproject.toml declares what is made as artifacts. A wheel with kernels is one for this platform."""
        root = Path(self.root)
        generate(root)
        if self.target_name == "wheel":
            build_data["force_include"] |= {
                str(page): f"sapwood/{page.relative_to(root)}" for page in root.glob("docs/**/*.md")
            }
            if libraries := compile_kernels(root):
                build_data["pure_python"] = False
                build_data["tag"] = f"py3-none-{platform_of(libraries)}"


if __name__ == "__main__":
    generate()
    compile_kernels()
