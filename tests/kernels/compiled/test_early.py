"""Libraries that are compiled early are built as their first use would build them, so that it finds nothing to do."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from sapwood_kernels.compiled.early import _is_built, build_each


class FakeLibrary:
    """Is there once it was built, with the log of the ninja that ran in its own folder."""

    is_aot = False

    def __init__(self, folder: Path, beside: threading.Barrier) -> None:
        self.build_dir = folder
        self._beside = beside

    @property
    def is_compiled(self) -> bool:
        return (self.build_dir / "library.so").exists()

    def build(self, verbose: bool) -> None:
        self._beside.wait(20)  # all are built at the same time
        self.build_dir.mkdir()
        (self.build_dir / ".ninja_log").touch()
        (self.build_dir / "library.so").touch()


def test_libraries_are_built_side_by_side_each_in_its_own_folder(tmp_path: Path) -> None:
    beside = threading.Barrier(3)
    libraries = [FakeLibrary(tmp_path / name, beside) for name in "abc"]
    assert not any(map(_is_built, libraries))
    build_each(libraries)
    assert all(map(_is_built, libraries))
    (libraries[0].build_dir / ".ninja_log").unlink()  # as another folder's ninja would leave it
    assert libraries[0].is_compiled and not _is_built(libraries[0])


def test_what_the_compiler_says_is_raised(tmp_path: Path) -> None:
    library = FakeLibrary(tmp_path, threading.Barrier(1))  # its folder is there already
    with pytest.raises(FileExistsError):
        build_each([library])
