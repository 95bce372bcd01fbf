"""Archives of compiled kernels as a worker takes them, and the rehearsal that compiles what is in them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from sapwood_common.errors import ConfigError
from sapwood_kernels.compiled import archive
from sapwood_worker.model.compiled_kernels import take_kernels
from sapwood_worker.model.rehearsal import rehearse

FACTS = {"compute capability": "9.0", "torch": "2.11"}


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / "workspace"))


def write(file: Path, facts: archive.Facts) -> Path:
    library = file.parent / file.stem / "lib" / "lib.so"
    library.parent.mkdir(parents=True)
    library.write_text(file.stem)
    archive.pack(file, facts, file.parent / "none", file.parent / file.stem)
    return file


def test_of_a_folder_the_archive_for_this_machine_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    write(tmp_path / "a.tgz", FACTS | {"compute capability": "8.0"})
    write(tmp_path / "b.tgz", FACTS)
    with caplog.at_level(logging.INFO):
        take_kernels(tmp_path, FACTS)
    assert "b.tgz has 0 of Triton's and 1 of FlashInfer's that were not here" in caplog.text
    [library] = (tmp_path / "workspace").rglob("lib.so")
    assert library.read_text() == "b"


def test_what_does_not_fit_is_said_and_not_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    file = write(tmp_path / "old.tgz", FACTS | {"torch": "2.10"})
    take_kernels(file, FACTS)
    assert "nothing for this machine, kernels are compiled: old.tgz is for torch 2.10, here 2.11" in caplog.text
    assert not (tmp_path / "workspace").exists()


def test_a_path_that_is_not_there_and_a_file_that_is_no_archive_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"--kernels .*none: there is no such file or folder"):
        take_kernels(tmp_path / "none", FACTS)
    (tmp_path / "bad.tgz").write_text("no archive")
    with pytest.raises(ConfigError, match=r"--kernels .*bad\.tgz: cannot be read"):
        take_kernels(tmp_path, FACTS)


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_a_rehearsal_runs_all_kinds_of_steps(name: str, tiny_model, make_runner):
    assert rehearse(make_runner(tiny_model(name).path, max_running=8)) == 12
    assert rehearse(make_runner(tiny_model(name).path, max_running=1)) == 4
