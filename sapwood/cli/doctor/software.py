"""Looks at Python, at the packages of each part of Sapwood, and at the stubs made of the protos."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from sapwood.cli.doctor.finding import Finding
from sapwood_common.python_process import python_command

_SERVICES = ("router", "tokenizer", "worker")
_OPTIONAL = {
    "models": "models by their names on the hub",
    "s3": "models at s3:// URLs",
    "cli": "colours and progress bars",
    "otel": "traces",
    "bench": "`sapwood bench`",
}
_STUBS = Path(__file__).resolve().parents[2] / "v1"


def examine_python() -> Finding:
    """The interpreter."""
    return Finding("python", "ok", f"{sys.version.split()[0]} ({sys.executable})")


def examine_packages() -> Iterator[Finding]:
    """The packages that each service and each extra needs, by Sapwood's installed requirements."""
    if importlib.util.find_spec("packaging") is None:
        parts = ", ".join((*_SERVICES, *_OPTIONAL))
        found = f"not installed: without it the packages of {parts} cannot be looked at"
        yield Finding("packaging", "missing", found, "pip install packaging")
        return
    for extra in _SERVICES:
        wrong = problems_of(extra)
        if wrong:
            yield Finding(extra, "missing", f"needs {'; '.join(wrong)}", f"pip install 'sapwood[{extra}]'")
        else:
            yield Finding(extra, "ok", "its packages are installed")
    for extra, use in _OPTIONAL.items():
        wrong = problems_of(extra)
        if wrong:
            yield Finding(extra, "note", f"{use}: needs {'; '.join(wrong)}", f"pip install 'sapwood[{extra}]'")
        else:
            yield Finding(extra, "ok", f"{use}: its packages are installed")


def problems_of(extra: str) -> list[str]:
    """Problems of an extra: each requirement that no installed package meets, with the installed version."""
    from packaging.requirements import Requirement

    if extra not in (metadata.metadata("sapwood").get_all("Provides-Extra") or ()):
        return ["Sapwood installed again: what is installed knows no such extra"]
    found: dict[str, None] = {}
    todo, seen = [extra], {extra}
    while todo:
        of = todo.pop()
        for line in metadata.requires("sapwood") or ():
            requirement = Requirement(line)
            if requirement.marker is None or not requirement.marker.evaluate({"extra": of}):
                continue
            if requirement.name == "sapwood":
                todo += requirement.extras - seen
                seen |= requirement.extras
                continue
            try:
                installed = metadata.version(requirement.name)
            except metadata.PackageNotFoundError:
                found[f"{requirement.name} (not installed)"] = None
                continue
            if not requirement.specifier.contains(installed, prereleases=True):
                found[f"{requirement.name}{requirement.specifier} ({installed} is installed)"] = None
    return list(found)


def examine_protos(stubs: Path = _STUBS) -> Finding:
    """Whether the stubs are there, and, where the protos and their compiler are too, whether they are of these protos.

    Args:
        stubs: Their folder; in a checkout the protos are in ``protos`` next to its package's folder.
    """
    root = stubs.parents[1]
    protos = sorted((root / "protos").glob("sapwood/v1/*.proto"))
    mend = "make proto" if protos else "pip install --force-reinstall --no-deps sapwood"
    wanted = [f"{proto.stem}_pb2.py" for proto in protos] or ["router_pb2.py", "tokenizer_pb2.py", "worker_pb2.py"]
    missing = [name for name in wanted if not (stubs / name).is_file()]
    if missing:
        return Finding("protos", "missing", f"{missing[0]} is not in {stubs}", mend)
    if not protos or importlib.util.find_spec("grpc_tools") is None:
        return Finding("protos", "ok", "the stubs are there")
    with tempfile.TemporaryDirectory() as folder:
        compiled = Path(folder) / "descriptors.binpb"
        done = subprocess.run(
            [
                *python_command("-m", "grpc_tools.protoc", f"-I{root / 'protos'}"),
                *(f"--descriptor_set_out={compiled}", "--include_imports", "--include_source_info"),
                *(str(proto.relative_to(root / "protos")) for proto in protos),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            return Finding("protos", "missing", f"protoc refuses {root / 'protos'}: {done.stderr.splitlines()[0]}")
        kept = stubs / "descriptors.binpb"
        if not kept.is_file() or kept.read_bytes() != compiled.read_bytes():
            return Finding("protos", "missing", "the stubs are not of the protos that lie here", mend)
    return Finding("protos", "ok", "the stubs are of the protos that lie here")
