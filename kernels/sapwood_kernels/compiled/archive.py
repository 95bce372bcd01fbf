"""Archives of what Triton and FlashInfer have compiled for one kind of GPU: a cold start that has one needs no compiler.

An archive is a .tgz of a manifest, Triton's cache (a folder for each kernel, named by a hash of its source, the compiler and the
GPU; and files that mark complete compilations) and FlashInfer's libraries (each named by its target). A kernel whose
source has changed since is not found by its name, and is compiled; nothing wrong is ever taken.
"""

from __future__ import annotations

import io
import json
import platform
import shutil
import sys
import tarfile
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

Facts = dict[str, str]
"""The facts that compiled kernels depend on, by name."""

_MANIFEST, _TRITON, _FLASHINFER = "manifest.json", "triton", "flashinfer"
_GROUP = "__grp__"
"""Triton's lists of a kernel's files begin so; they name the files by their whole paths."""


class Contents(NamedTuple):
    """The numbers of Triton kernels and FlashInfer libraries in an archive, or of those that were new to a machine."""

    triton: int
    flashinfer: int


def machine_facts(capability: tuple[int, int], cuda: str) -> Facts:
    """The facts of this machine that compiled kernels depend on.

    Args:
        capability: The GPU's compute capability.
        cuda: The version of CUDA that torch is built for.
    """
    facts = {"compute capability": f"{capability[0]}.{capability[1]}", "CUDA": cuda, "machine": platform.machine()}
    facts["Python"] = f"{sys.version_info.major}.{sys.version_info.minor}"
    for package in ("torch", "triton", "flashinfer-python"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "none"
    return facts


def pack(archive: Path, facts: Facts, triton: Path, flashinfer: Path) -> Contents:
    """Writes an archive; it appears whole or not at all.

    Args:
        archive: The new file.
        facts: What this machine is.
        triton: Triton's cache.
        flashinfer: The folder where FlashInfer has built, with a folder for each library.

    Raises:
        OSError: It cannot be written.
    """
    entries = sorted(each for each in triton.glob("*") if each.is_dir() and _finished(each))
    libraries = sorted(each for each in flashinfer.glob("*/*.so") if each.stem == each.parent.name)
    part = archive.with_name(f".{archive.name}.part")
    with tarfile.open(part, "w:gz", compresslevel=6) as tar:
        manifest = json.dumps(facts, indent=1).encode()
        about = tarfile.TarInfo(_MANIFEST)
        about.size = len(manifest)
        tar.addfile(about, io.BytesIO(manifest))
        for entry in entries:
            for file in sorted(each for each in entry.iterdir() if each.is_file() and each.name != "lock"):
                tar.add(file, f"{_TRITON}/{entry.name}/{file.name}")
        for mark in sorted(each for each in triton.glob("*") if each.is_file()):
            tar.add(mark, f"{_TRITON}/{mark.name}")
        for library in libraries:
            tar.add(library, f"{_FLASHINFER}/{library.parent.name}/{library.name}")
    part.replace(archive)
    return Contents(len(entries), len(libraries))


def read_facts(archive: Path) -> Facts:
    """The facts that an archive's kernels depend on.

    Raises:
        ValueError: The file is not there or no such archive; names it.
    """
    try:
        with tarfile.open(archive, "r:gz") as tar:
            first = tar.next()
            file = tar.extractfile(first) if first is not None and first.name == _MANIFEST else None
            found = json.loads(file.read()) if file is not None else None
    except (OSError, tarfile.TarError, ValueError, EOFError) as error:
        raise ValueError(f"{archive}: cannot be read: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(each, str) for each in found.values()):
        raise ValueError(f"{archive}: is no archive of `sapwood kernels build`")
    return found


def differences(archive: Facts, machine: Facts) -> list[str]:
    """Why an archive's kernels cannot be used on a machine, in words; empty: they can."""
    names = dict.fromkeys((*machine, *archive))
    return [
        f"{name} {archive.get(name, 'none')}, here {machine.get(name, 'none')}"
        for name in names
        if archive.get(name) != machine.get(name)
    ]


def unpack(archive: Path, triton: Path, flashinfer: Path) -> Contents:
    """Puts an archive's kernels where they are looked for; those that are there already stay. Several processes may at once.

    Args:
        archive: Whose facts are this machine's.
        triton: Triton's cache.
        flashinfer: A folder for the libraries.

    Returns:
        How many were new.

    Raises:
        ValueError: The file is damaged, or holds an entry that is not allowed; the error names the file or entry.
        OSError: A folder cannot be written.
    """
    new = []
    for name, target in ((_TRITON, triton), (_FLASHINFER, flashinfer)):
        target.mkdir(parents=True, exist_ok=True)
        # In the folder of the final file, so that others see nothing of it but a rename.
        folder = Path(tempfile.mkdtemp(prefix=".unpacking-", dir=target))
        try:
            _extract(archive, name, folder)
            found = sorted((folder / name).glob("*"))
            new.append(sum(_move(each, target / each.name) for each in found if each.is_dir()))
            for mark in (each for each in found if each.is_file()):  # once all that it speaks of is there
                mark.replace(target / mark.name)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return Contents(*new)


def _extract(archive: Path, name: str, folder: Path) -> None:
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                if member.isfile() and member.name.startswith(f"{name}/"):
                    _write(tar, member, folder)
    except (tarfile.TarError, EOFError) as error:
        raise ValueError(f"{archive}: cannot be unpacked: {error}") from error


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    """Extracts as ``tar.extract(..., filter="data")`` does, which Python has only from 3.11.4 on."""
    target = (folder / member.name).resolve()
    if not target.is_relative_to(folder.resolve()):
        raise tarfile.TarError(f"{member.name} leads out of it")
    target.parent.mkdir(parents=True, exist_ok=True)
    found = tar.extractfile(member)
    assert found is not None, "it is a file"
    with found, target.open("wb") as file:
        shutil.copyfileobj(found, file)


def _move(source: Path, target: Path) -> bool:
    """Puts a kernel in its place; returns whether it was not there before."""
    if target.is_dir() and _finished(target):
        return False
    for group in source.glob(f"{_GROUP}*"):
        found = json.loads(group.read_text())
        found["child_paths"] = {name: str(target / name) for name in found["child_paths"]}
        group.write_text(json.dumps(found))
    try:
        source.rename(target)
    except OSError:  # another process was faster, or a folder is there that holds nothing yet
        target.mkdir(exist_ok=True)
        for file in sorted(source.iterdir(), key=lambda each: each.name.startswith(_GROUP)):
            file.replace(target / file.name)
    return True


def _finished(entry: Path) -> bool:
    """Whether a kernel's folder holds all of it: Triton writes the list of its files last; others have one file."""
    files = [each for each in entry.iterdir() if each.is_file() and each.name != "lock"]
    return any(each.name.startswith(_GROUP) for each in files) or any(each.suffix == ".so" for each in files)
