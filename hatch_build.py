"""Generates stubs and descriptor set in ``sapwood/v1`` from ``protos``: on install (hatchling calls it) and by ``make proto``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand: only generate() is needed
    BuildHookInterface = object  # type: ignore[assignment, misc]

ROOT = Path(__file__).resolve().parent


def generate(root: Path = ROOT) -> None:
    """Writes ``*_pb2.py``, ``*_pb2_grpc.py``, their type stubs and ``descriptors.binpb`` beside ``sapwood/v1/__init__.py``.

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


class StubsHook(BuildHookInterface):  # type: ignore[type-arg, misc, unused-ignore]
    """Runs :func:`generate` before a wheel, an editable install or an sdist is put together."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """See hatchling; ``build_data`` is left as it is, the stubs are declared as artifacts in pyproject.toml."""
        generate(Path(self.root))


if __name__ == "__main__":
    generate()
